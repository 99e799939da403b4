"""OpenAIAnswer: the common part of chats and completions: ids, usage, and the ends of streams."""

import secrets
import time
from collections.abc import Sequence

from frontend.http.bodies import ChatBody, CompletionBody
from frontend.http.errors import HttpError
from frontend.http.replies.answer_format import EVENT_STREAM, error_event, event, json_bytes
from frontend.http.replies.text_frames import FramedFormat, TextFrames
from frontend.http.replies.usage import Usage
from frontend.http.request import new_id
from frontend.http.service import Service
from frontend.results.outputs import CompletionOutput
from frontend.session import PreparedRequest
from ipc.errors import InvalidRequestError
from ipc.params.sampling_params import SamplingParams
from ipc.records.receipt import Answered, check_provable, ids_bytes, make_receipt
from ipc.wire.messages import AddRequest


class Receipts:
    """The receipts of one answer, a receipt for each prompt. Errors: InvalidRequestError, if there can be none."""

    def __init__(self, service: Service, prepared: Sequence[PreparedRequest]) -> None:
        self._service, self._version = service, service.engine.client.weights_version
        self._requests = [_request(one) for one in prepared]
        check_provable(service.engine.client.welcome)
        self._n = prepared[0].params.n
        num_choices = len(prepared) * self._n
        self._token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._finishes: list[str | None] = [None] * num_choices

    def take(self, index: int, output: CompletionOutput) -> None:
        """Note the new part of a choice."""
        self._token_ids[index] += output.token_ids
        self._finishes[index] = output.finish_reason

    def fields(self) -> dict[str, object]:
        """Return the field `receipts` of an answer that has ended."""
        choices = [Answered(*one) for one in zip(self._token_ids, self._finishes, strict=True)]
        client, key = self._service.engine.client, self._service.receipt_key
        if client.weights_version != self._version:
            raise InvalidRequestError(
                "no receipt can be made of this answer: the weights changed while it was computed"
            )
        welcome = client.welcome_of(self._version)
        parts = [choices[first : first + self._n] for first in range(0, len(choices), self._n)]
        made = [make_receipt(welcome, *one, key) for one in zip(self._requests, parts, strict=True)]
        return {"receipts": made}


def with_seeds(prepared: Sequence[PreparedRequest], body: ChatBody | CompletionBody) -> list[PreparedRequest]:
    """Return the requests, each with a seed if the answer is to have a receipt, which says it."""
    if not body.receipt or prepared[0].params.seed is not None:
        return list(prepared)
    return [one._replace(params=one.params.changed(seed=secrets.randbits(64))) for one in prepared]


def _request(prepared: PreparedRequest) -> AddRequest:
    prompt, params = prepared.prompt, prepared.params
    assert params.seed is not None
    uses = [one.use for one in prompt.features]
    return AddRequest(0, ids_bytes(prompt.token_ids), params, params.seed, adapter=prepared.adapter, features=uses)


class OpenAIAnswer(FramedFormat):
    """The base of an answer of OpenAI's API. prefix: of its id; kind: the field `object`; name: of the model."""

    stream_type = EVENT_STREAM
    keep_alive = b": keep-alive\n\n"

    def __init__(
        self,
        service: Service,
        body: ChatBody | CompletionBody,
        prepared: Sequence[PreparedRequest],
        *,
        prefix: str,
        kind: str,
        name: str,
    ) -> None:
        self._service = service
        self._receipts = Receipts(service, prepared) if body.receipt else None
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
        proof = b""
        if self._receipts is not None:
            proof = event({**self._fields, "choices": [], **self._receipts.fields()})
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
