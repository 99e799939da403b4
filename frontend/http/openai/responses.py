"""/v1/responses: OpenAI's Responses API, stateless."""

import time
from collections.abc import Sequence

import msgspec

from frontend.http.bodies import Json
from frontend.http.chat_request import PreparedChat, prepare_chat
from frontend.http.errors import HttpError
from frontend.http.openai.chat_message import CallIds
from frontend.http.openai.logprobs import chat_logprobs
from frontend.http.openai.response_items import ResponseItems, TokenText
from frontend.http.openai.responses_bodies import ResponsesBody, chat_of
from frontend.http.replies.answer_format import EVENT_STREAM, PromptSide, json_bytes
from frontend.http.replies.reply import Reply
from frontend.http.replies.thought_tokens import note_thoughts
from frontend.http.replies.usage import Usage
from frontend.http.request import Request, new_id
from frontend.http.service import Service
from frontend.results.outputs import CompletionOutput

_decoder = msgspec.json.Decoder(ResponsesBody)
#: Fields that an answer repeats from its request.
_REPEATED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p")


async def create_response(service: Service, request: Request) -> Reply:
    """Answer a request of OpenAI's Responses API."""
    body = request.decode(_decoder)
    name = service.check_model(request, body.model)
    prepared = await prepare_chat(service, request, chat_of(body, service.meter.note_left_out))
    return await service.submit(request, prepared.requests, ResponsesFormat(service, body, name, prepared))


class ResponsesFormat:
    """Answers of /v1/responses: items of reasoning, text and calls, in the model's order."""

    stream_type = EVENT_STREAM
    keep_alive = b": keep-alive\n\n"

    def __init__(self, service: Service, body: ResponsesBody, name: str, prepared: PreparedChat) -> None:
        self._tokenizer, self._num_top = service.engine.tokenizer, body.top_logprobs or 0
        self._skips_special = prepared.requests[0].params.skip_special_tokens
        self._fields: Json = {
            "id": f"resp_{new_id()}",
            "object": "response",
            "created_at": int(time.time()),
            "model": name,
            **{field: getattr(body, field) for field in _REPEATED},
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "text": body.text or {"format": {"type": "text"}},
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "previous_response_id": None,
            "store": False,
            "background": False,
            "truncation": "disabled",
        }
        scanner = prepared.scanners[0] if prepared.scanners else None
        self._items = ResponseItems(scanner, CallIds(prepared.id_length))
        self._thoughts = prepared.thoughts
        self._is_cut = False
        self._number = 2  # of the next event; those of opening() are 0 and 1

    def opening(self) -> bytes:
        """Return the beginning of the response."""
        response = {**self._response("in_progress", None), "output": []}  # a first piece may already have been read
        created = _event("response.created", 0, response=response)
        return created + _event("response.in_progress", 1, response=response)

    def piece(self, index: int, output: CompletionOutput, usage: Usage) -> bytes:
        """Return the events of the new text."""
        self._is_cut = output.finish_reason == "length"
        events = self._items.feed(output.text, output.finish_reason, self._tokens(output))
        for thoughts in self._thoughts:  # of the one choice
            thoughts.take(output.token_ids)
        if output.finish_reason is not None:
            note_thoughts(self._thoughts, usage)
        return b"".join(self._event(kind, **fields) for kind, fields in events)

    def _tokens(self, output: CompletionOutput) -> list[TokenText]:
        """Return the tokens with log probabilities, of which the last may have ended the answer."""
        if output.logprobs is None:
            return []
        shown = chat_logprobs(output.token_ids, output.logprobs, self._tokenizer, self._num_top, as_ids=False)
        entries = msgspec.json.decode(msgspec.json.encode(shown["content"]))
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
        status = "incomplete" if self._is_cut else "completed"
        return self._event(f"response.{status}", response=self._response(status, usage))

    def failure(self, error: HttpError) -> bytes:
        """Return the event of an error."""
        fields = error.fields()
        shown = {"code": str(fields["code"]), "message": fields["message"], "param": fields["param"]}
        return self._event("error", **shown, error=fields)

    def whole(self, choices: list[CompletionOutput], prompts: Sequence[PromptSide], usage: Usage) -> bytes:
        """Return the body of a whole answer."""
        self.piece(0, choices[0], usage)
        return json_bytes(self._response("incomplete" if self._is_cut else "completed", usage))

    def _response(self, status: str, usage: Usage | None) -> Json:
        return {
            **self._fields,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items.items,
            "usage": None if usage is None else _usage(usage),
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
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
