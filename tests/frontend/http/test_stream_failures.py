"""What ends a stream that failed after its head, in each dialect."""

import json
from types import SimpleNamespace
from typing import Any

from frontend.http.anthropic.messages import MessagesFormat
from frontend.http.errors import HttpError
from frontend.http.openai.responses import ResponsesFormat
from frontend.http.openai.responses_bodies import ResponsesBody
from ipc.params.sampling_params import SamplingParams

ERROR = HttpError(503, "the engine is gone", code="unavailable")
REQUEST = SimpleNamespace(prompt=SimpleNamespace(token_ids=[1]), params=SamplingParams())
SERVICE: Any = SimpleNamespace(engine=SimpleNamespace(tokenizer=None))
PREPARED: Any = SimpleNamespace(scanners=None, id_length=None, thoughts=(), requests=[REQUEST])


def test_responses_end_in_an_error_event() -> None:
    answer = ResponsesFormat(SERVICE, ResponsesBody(input="x"), "m", PREPARED)
    begin, end = answer.opening(), answer.failure(ERROR)
    assert begin.count(b"\n\n") == 2
    name, data = end.decode().rstrip("\n").split("\n")
    shown = json.loads(data.removeprefix("data: "))
    assert name == "event: error"
    assert (shown["type"], shown["sequence_number"], shown["message"]) == ("error", 2, "the engine is gone")
    assert (shown["code"], shown["error"]["type"]) == ("unavailable", "ServiceUnavailableError")


def test_messages_end_in_an_error_event() -> None:
    answer = MessagesFormat("m", PREPARED, 0)
    name, data = answer.failure(ERROR).decode().rstrip("\n").split("\n")
    assert name == "event: error"
    error = {"type": "overloaded_error", "message": "the engine is gone"}
    assert json.loads(data.removeprefix("data: ")) == {"type": "error", "error": error}
