"""OpenAIAnswer: the common part of chats and completions: ids, usage, and the ends of streams."""

import time

from frontend.http.bodies import ChatBody, CompletionBody
from frontend.http.errors import HttpError
from frontend.http.replies.answer_format import EVENT_STREAM, error_event, event, json_bytes
from frontend.http.replies.text_frames import FramedFormat, TextFrames
from frontend.http.replies.usage import Usage
from frontend.http.request import new_id
from frontend.http.service import Service
from ipc.params.sampling_params import SamplingParams


class OpenAIAnswer(FramedFormat):
    """The base of an answer of OpenAI's API. prefix: of its id; kind: the field `object`; name: of the model."""

    stream_type = EVENT_STREAM
    keep_alive = b": keep-alive\n\n"

    def __init__(
        self,
        service: Service,
        body: ChatBody | CompletionBody,
        *,
        prefix: str,
        kind: str,
        name: str,
    ) -> None:
        self._service = service
        self._tokenizer = service.engine.tokenizer
        self._fields = {
            "id": f"{prefix}-{new_id()}",
            "object": kind,
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": service.fingerprint,
        }
        options = body.stream_options
        self._shows_usage = bool(options and options.include_usage) or service.options.include_usage
        is_asked = bool(options and options.include_usage and options.continuous_usage_stats)
        self._counts_always = is_asked or service.options.include_usage  # in every event, as in vLLM

    def closing(self, usage: Usage) -> bytes:
        """Return the usage, if requested, and the end of the stream."""
        counts = event({**self._fields, "choices": [], "usage": usage.openai()}) if self._shows_usage else b""
        proof = event({**self._fields, "choices": [], **usage.proof()}) if usage.receipts else b""
        return counts + proof + b"data: [DONE]\n\n"

    def failure(self, error: HttpError) -> bytes:
        """Return the error and the end of the stream."""
        return error_event(error)

    def _heads(self, count: int, field: bytes) -> list[bytes]:
        """Return, for each of `count` choices, the start of an event up to the text of this field."""
        begin = b"data: " + json_bytes(self._fields)[:-1]
        return [b'%b,"choices":[{"index":%d,%b' % (begin, index, field) for index in range(count)]

    def _frames(self, heads: list[bytes], tail: bytes, params: SamplingParams) -> TextFrames | None:
        """Return the frames of events with these starts; None if there are none."""
        table = self._service.token_json(skip_special_tokens=params.skip_special_tokens)
        return TextFrames([head + b'"' for head in heads], b'"' + tail, table) if heads and table is not None else None

    def _chunk(self, choice: dict[str, object], usage: Usage) -> bytes:
        """Return the event of one choice, with the usage so far if requested."""
        more = {"usage": usage.openai()} if self._counts_always else {}
        return event({**self._fields, "choices": [choice], **more})
