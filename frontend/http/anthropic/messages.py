"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from collections.abc import Sequence

import msgspec

from frontend.calls.delta import Delta, Kind
from frontend.calls.parsed import ParsedAnswer, WholeCall
from frontend.http.anthropic.breakpoints import breakpoints_of
from frontend.http.anthropic.messages_bodies import CountBody, MessagesBody, chat_of
from frontend.http.bodies import Json
from frontend.http.chat_request import PreparedChat, count_tokens, prepare_chat
from frontend.http.errors import HttpError
from frontend.http.openai.chat_message import CallIds
from frontend.http.replies.answer_format import EVENT_STREAM, PromptSide, json_bytes
from frontend.http.replies.reply import Reply
from frontend.http.replies.usage import Usage
from frontend.http.request import Request, Response, new_id
from frontend.http.service import Service
from frontend.results.outputs import CompletionOutput
from ipc.wire.pin_messages import PinAnswer

_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountBody)
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_KINDS = {Kind.CONTENT: "text", Kind.REASONING: "thinking"}


async def create_message(service: Service, request: Request) -> Reply:
    """Answer a chat of Anthropic's API."""
    body = request.decode(_decoder)
    name = service.check_model(request, body.model)
    request.breakpoints = breakpoints_of(body)
    prepared = await prepare_chat(service, request, chat_of(body, service.meter.note_left_out))
    return await service.submit(
        request, prepared.requests, MessagesFormat(name, prepared, service.standing.cached_block)
    )


async def count_message_tokens(service: Service, request: Request) -> Response:
    """Count the tokens of a chat's prompt."""
    body = request.decode(_count_decoder)
    service.check_model(request, body.model)
    chat = chat_of(body, service.meter.note_left_out)
    return Response(json_bytes({"input_tokens": await count_tokens(service, request, chat)}))


def error_body(error: HttpError) -> bytes:
    """Return the body of an error in Anthropic's form."""
    return json_bytes(_error(error))


class MessagesFormat:
    """Answers of /v1/messages: blocks of thinking, text and calls, in the model's order."""

    stream_type = EVENT_STREAM
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, name: str, prepared: PreparedChat, cached_block: int) -> None:
        """cached_block: see Standing."""
        self._name = name
        self._id = f"msg_{new_id()[:24]}"
        self._num_prompt = len(prepared.requests[0].prompt.token_ids)
        self._num_cached = 0  # of the prompt's tokens; known with the first piece, as are those that are put there
        self._cached_block, self._is_computed = cached_block, False
        self._pins: Sequence[PinAnswer] = ()
        self._answer = ParsedAnswer(prepared.scanners[0] if prepared.scanners else None)
        self._ids = CallIds(prepared.id_length, "toolu_")
        self._blocks: list[Json] = []
        self._has_open = False
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}

    def opening(self) -> bytes:
        """Return the beginning of the message."""
        message = self._message(Usage(self._num_prompt, cached_tokens=self._num_cached, pins=self._pins))
        none_yet: Json = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }  # a piece may have been read
        return _event("message_start", message={**message, **none_yet})

    def piece(self, index: int, output: CompletionOutput, usage: Usage) -> bytes:
        """Return the events of the new text."""
        self._num_cached, self._is_computed, self._pins = usage.cached_tokens, True, usage.pins
        is_end = output.finish_reason is not None
        events = [self._part(part) for part in self._answer.feed(output.text, is_end=is_end)]
        if is_end:
            events.append(self._close())
            self._stop = self._stop_fields(output)
        return b"".join(events)

    def closing(self, usage: Usage) -> bytes:
        """Return the stop reason, the usage, and the end of the message."""
        return _event("message_delta", delta=self._stop, usage=self._usage(usage), **usage.proof()) + _event(
            "message_stop"
        )

    def failure(self, error: HttpError) -> bytes:
        """Return the event of an error."""
        return b"event: error\ndata: %b\n\n" % json_bytes(_error(error))

    def whole(self, choices: list[CompletionOutput], prompts: Sequence[PromptSide], usage: Usage) -> bytes:
        """Return the body of a whole answer."""
        self.piece(0, choices[0], usage)
        return json_bytes({**self._message(usage), **usage.proof()})

    def _message(self, usage: Usage) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._name,
            "content": self._blocks,
            **self._stop,
            "usage": self._usage(usage),
        }

    def _part(self, part: Delta | WholeCall) -> bytes:
        """Add a part of the answer to the blocks; return its events."""
        if isinstance(part, WholeCall):
            block: Json = {"type": "tool_use", "id": self._ids.make(), "name": part.name, "input": {}}
            events = self._open(block)
            block["input"] = part.arguments
            arguments = json_bytes(part.arguments).decode()
            return events + self._delta({"type": "input_json_delta", "partial_json": arguments}) + self._close()
        kind, events = _KINDS[part.kind], b""
        if not self._has_open or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            events = self._open({"type": kind, kind: "", **signature})
        self._blocks[-1][kind] += part.text
        return events + self._delta({"type": f"{kind}_delta", kind: part.text})

    def _open(self, block: Json) -> bytes:
        events = self._close()
        self._blocks.append(block)
        self._has_open = True
        return events + _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> bytes:
        if not self._has_open:
            return b""
        self._has_open = False
        return _event("content_block_stop", index=len(self._blocks) - 1)

    def _usage(self, usage: Usage) -> Json:
        """Return the counts, of which those of input add up to the prompt: each of its tokens is in one of the three.

        The engine puts the whole blocks of a prompt into its prefix cache when it computes them.
        """
        block = self._cached_block if self._is_computed else 0
        whole = usage.prompt_tokens // block * block if block else 0
        created = max(0, whole - usage.cached_tokens)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            **usage.pinned(),
        }

    def _stop_fields(self, output: CompletionOutput) -> Json:
        if output.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(output.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
        reason = "tool_use" if self._answer.num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json_bytes({"type": kind, **fields}))


def _error(error: HttpError) -> Json:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.fields()["message"]}}
