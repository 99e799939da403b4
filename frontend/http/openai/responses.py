"""ResponsesFormat: the answers of OpenAI's Responses API."""

import time
from collections.abc import Sequence

import msgspec

from frontend.http.bodies import Json
from frontend.http.chat_request import PreparedChat
from frontend.http.errors import HttpError
from frontend.http.openai.chat_message import CallIds
from frontend.http.openai.logprobs import chat_logprobs
from frontend.http.openai.response_items import ResponseItems, TokenText
from frontend.http.openai.responses_bodies import ResponsesBody
from frontend.http.replies.answer_format import EVENT_STREAM, PromptSide, StoredFormat, json_bytes
from frontend.http.replies.thought_tokens import note_thoughts
from frontend.http.replies.usage import Usage
from frontend.http.request import new_id
from frontend.http.service import Service
from frontend.http.stored.runs import Kept
from frontend.results.outputs import CompletionOutput

#: Fields that an answer repeats from its request.
_REPEATED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p")


class ResponsesFormat(StoredFormat):
    """Answers of /v1/responses: items of reasoning, text and calls, in the model's order.

    kept: the response, if it is stored. The events of one in the background go to its run.
    """

    stream_type = EVENT_STREAM
    keep_alive = b": keep-alive\n\n"

    def __init__(
        self, service: Service, body: ResponsesBody, name: str, prepared: PreparedChat, *, kept: Kept | None = None
    ) -> None:
        self._kept, self._run = kept, None if kept is None else kept.run
        self.is_stored, self.takes_each_token = kept is not None, self._run is not None
        self._final: Json = {}
        if self._run is not None:
            self._run.begin()
        self._tokenizer, self._num_top = service.engine.tokenizer, body.top_logprobs or 0
        self._skips_special = prepared.requests[0].params.skip_special_tokens
        self._fields: Json = {
            "id": f"resp_{new_id()}" if kept is None else kept.id,
            "object": "response",
            "created_at": int(time.time()) if kept is None else kept.created,
            "model": name,
            **{field: getattr(body, field) for field in _REPEATED},
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "text": body.text or {"format": {"type": "text"}},
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "previous_response_id": body.previous_response_id,
            "store": kept is not None,
            "background": self._run is not None,
            "truncation": body.truncation or "disabled",
        }
        if kept is not None and kept.conversation is not None:
            self._fields["conversation"] = {"id": kept.conversation}
        scanner = prepared.scanners[0] if prepared.scanners else None
        draw = new_id if kept is None else kept.draw
        self._items = ResponseItems(scanner, CallIds(prepared.id_length, draw=draw), draw)
        self._thoughts = prepared.thoughts
        self._is_cut = False
        self._number = 2  # of the next event; those of opening() are 0 and 1
        if self._run is not None:
            for event in self._opening():
                self._run.add(event)
            self._run.snapshot = self._response("in_progress", None)

    def opening(self) -> bytes:
        """Return the beginning of the response."""
        return b"".join(self._opening())

    def _opening(self) -> list[bytes]:
        response = {**self._response("in_progress", None), "output": []}  # a first piece may already have been read
        kinds = ("response.created", "response.in_progress")
        return [_event(kind, number, response=response) for number, kind in enumerate(kinds)]

    def begun(self) -> Json:
        """Return the response before its first token."""
        return self._response("queued", None)

    def piece(self, index: int, output: CompletionOutput, usage: Usage) -> bytes:
        """Return the events of the new text."""
        self._is_cut = output.finish_reason == "length"
        events = self._items.feed(output.text, output.finish_reason, self._tokens(output))
        for thoughts in self._thoughts:  # of the one choice
            thoughts.take(output.token_ids)
        if output.finish_reason is not None:
            note_thoughts(self._thoughts, usage)
        pieces = [self._event(kind, **fields) for kind, fields in events]
        if self._run is not None:
            for piece in pieces:
                self._run.add(piece)
        return b"".join(pieces)

    def _tokens(self, output: CompletionOutput) -> list[TokenText]:
        """Return the tokens with log probabilities, of which the last may have ended the answer."""
        if output.logprobs is None:
            return []
        shown = chat_logprobs(output.token_ids, output.logprobs, self._tokenizer, self._num_top, as_ids=False)
        entries = msgspec.json.decode(json_bytes(shown["content"]))
        special = self._tokenizer.special_token_ids if self._tokenizer is not None and self._skips_special else ()
        found = [
            TokenText("", entry, is_shown=False) if token in special else TokenText(entry["token"], entry)
            for token, entry in zip(output.token_ids, entries, strict=True)
        ]
        if output.finish_reason == "stop" and not isinstance(output.stop_reason, str) and found:
            found[-1] = TokenText("", entries[-1], is_shown=False)
        return found

    def closing(self, usage: Usage) -> bytes:
        """Return the end of the response."""
        return self._last(self._ended(usage))

    async def store(self) -> None:
        """Store the response that closing() or whole() has made."""
        assert self._kept is not None, "the response is not stored"
        self._number -= 1  # of the event of closing(), which is not sent if this fails
        if self._run is None:
            await self._kept.put(self._final)
            return
        number = self._number
        try:
            await self._run.finish(self._final, lambda: self._last(self._final))
        except HttpError:
            self._number = number
            raise

    def failed(self, error: HttpError) -> tuple[Json, bytes]:
        """Return a response that has failed, and the last event of its stream."""
        fields = error.fields()
        shown = {"code": str(fields["code"]), "message": fields["message"]}
        self._final = {**self._response("failed", None), "error": shown}
        return self._final, self._last(self._final)

    def cancelled(self) -> Json:
        """Return a response that was cancelled."""
        return self._response("cancelled", None)

    def _ended(self, usage: Usage) -> Json:
        self._final = self._response("incomplete" if self._is_cut else "completed", usage)
        return self._final

    def _last(self, response: Json) -> bytes:
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: HttpError) -> bytes:
        """Return the event of an error."""
        fields = error.fields()
        shown = {"code": str(fields["code"]), "message": fields["message"], "param": fields["param"]}
        return self._event("error", **shown, error=fields)

    def whole(self, choices: list[CompletionOutput], prompts: Sequence[PromptSide], usage: Usage) -> bytes:
        """Return the body of a whole answer."""
        self.piece(0, choices[0], usage)
        return json_bytes(self._ended(usage))

    def _response(self, status: str, usage: Usage | None) -> Json:
        return {
            **self._fields,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items.items,
            "usage": None if usage is None else _usage(usage),
            **({} if usage is None else usage.proof()),
        }

    def _event(self, kind: str, **fields: object) -> bytes:
        self._number += 1
        return _event(kind, self._number - 1, **fields)


def _event(kind: str, number: int, **fields: object) -> bytes:
    data = json_bytes({"type": kind, "sequence_number": number, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0, **usage.pinned()},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
