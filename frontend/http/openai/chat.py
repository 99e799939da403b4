"""/v1/chat/completions: the handler, and the form of its answers."""

from collections.abc import Sequence

import msgspec

from frontend.calls.delta import fold
from frontend.http.bodies import ChatBody
from frontend.http.chat_request import PreparedChat, prepare_chat
from frontend.http.openai.chat_message import CallIds, delta_fields, message_fields
from frontend.http.openai.logprobs import chat_logprobs, prompt_logprobs
from frontend.http.openai.openai_answer import OpenAIAnswer
from frontend.http.replies.answer_format import PromptSide, event, json_bytes
from frontend.http.replies.reply import Reply
from frontend.http.replies.text_frames import TextFrames
from frontend.http.replies.thought_tokens import note_thoughts
from frontend.http.replies.usage import Usage
from frontend.http.request import Request
from frontend.http.service import Service
from frontend.results.outputs import CompletionOutput

_PLAIN_TAIL = b'},"logprobs":null,"finish_reason":null}]}\n\n'
_decoder = msgspec.json.Decoder(ChatBody)


async def create_chat_completion(service: Service, request: Request) -> Reply:
    """Answer a chat."""
    body = request.decode(_decoder)
    name = service.check_model(request, body.model)
    prepared = await prepare_chat(service, request, body)
    return await service.submit(request, prepared.requests, ChatFormat(service, body, name, prepared))


class ChatFormat(OpenAIAnswer):
    """Answers of /v1/chat/completions."""

    def __init__(self, service: Service, body: ChatBody, name: str, prepared: PreparedChat) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, body, prefix="chatcmpl", kind=kind, name=name)
        self._body = body
        self._params = prepared.requests[0].params
        self._n = prepared.requests[0].params.n
        self._prompt_ids = prepared.requests[0].prompt.token_ids
        self._scanners, self._thoughts = prepared.scanners, prepared.thoughts
        self._is_named = prepared.is_named
        self._ids = [CallIds(prepared.id_length) for _ in range(self._n)]
        is_scanned = self._scanners is not None
        says_more = bool(body.logprobs or self._counts_always or body.return_token_ids)
        self._is_plain = not (is_scanned or says_more)
        self._plain_heads = self._heads(self._n, b'"delta":{"content":') if body.stream and self._is_plain else []

    def opening(self) -> bytes:
        """Return the role of each choice, and the prompt's tokens if requested."""
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(self._n)]
        more: dict[str, object] = {"usage": Usage(len(self._prompt_ids)).openai()} if self._counts_always else {}
        if self._body.return_token_ids:
            more["prompt_token_ids"] = self._prompt_ids
        return b"".join(event({**self._fields, "choices": [choice], **more}) for choice in choices)

    def piece(self, index: int, output: CompletionOutput, usage: Usage) -> bytes:
        """Return the events of a choice's new text and of its end."""
        events = b""
        if self._is_plain:
            if output.text:
                text = json_bytes(output.text)
                events = self._plain_heads[index] + text + _PLAIN_TAIL
        else:
            events = self._events(index, output, usage)
        if output.finish_reason is None:
            return events
        end = {"finish_reason": self._finish_reason(index, output), "stop_reason": output.stop_reason}
        return events + self._chunk({"index": index, "delta": {}, "logprobs": None, **end}, usage)

    def text_frames(self) -> TextFrames | None:
        """Return the frames of plain events."""
        return self._frames(self._plain_heads, _PLAIN_TAIL, self._params)

    def whole(self, choices: list[CompletionOutput], prompts: Sequence[PromptSide], usage: Usage) -> bytes:
        """Return the body of a whole answer."""
        shown = []
        for index, output in enumerate(choices):
            choice = {
                "index": index,
                "message": self._message(index, output),
                "logprobs": self._logprobs(output),
                "finish_reason": self._finish_reason(index, output),
                "stop_reason": output.stop_reason,
            }
            choice["token_ids"] = output.token_ids if self._body.return_token_ids else None
            shown.append(choice)
            if self._thoughts:
                self._thoughts[index].take(output.token_ids)
        note_thoughts(self._thoughts, usage)
        more: dict[str, object] = {  # null if they were not asked for: programs for vLLM read them as attributes
            "prompt_logprobs": prompt_logprobs(prompts[0].logprobs) if self._body.prompt_logprobs is not None else None,
            "prompt_token_ids": prompts[0].token_ids if self._body.return_token_ids else None,
        }
        return json_bytes({**self._fields, "choices": shown, "usage": usage.openai(), **usage.proof(), **more})

    def _events(self, index: int, output: CompletionOutput, usage: Usage) -> bytes:
        """Return an event for each part of the message; the first has the tokens' data."""
        if self._scanners is None:
            deltas: list[dict[str, object]] = [{"content": output.text}] if output.text or output.token_ids else []
        else:
            scanner = self._scanners[index]
            found = scanner.feed(output.text)
            if output.finish_reason is not None:
                found += scanner.finish()
            if self._thoughts:
                self._thoughts[index].take(output.token_ids)
                if self._counts_always or output.finish_reason is not None:
                    note_thoughts(self._thoughts, usage)
            deltas = [delta_fields(delta, self._ids[index]) for delta in found]
        logprobs = self._logprobs(output)
        if not deltas and (self._body.return_token_ids or (logprobs is not None and logprobs["content"])):
            deltas = [{}] if output.token_ids else []
        events = []
        for place, delta in enumerate(deltas):
            choice: dict[str, object] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            if place == 0:
                choice["logprobs"] = logprobs
                if self._body.return_token_ids:
                    choice["token_ids"] = output.token_ids
            events.append(self._chunk(choice, usage))
        return b"".join(events)

    def _message(self, index: int, output: CompletionOutput) -> dict[str, object]:
        if self._scanners is None:
            return {"role": "assistant", "content": output.text, "reasoning": None}
        scanner = self._scanners[index]
        return {"reasoning": None} | message_fields(
            fold([*scanner.feed(output.text), *scanner.finish()]), self._ids[index]
        )

    def _finish_reason(self, index: int, output: CompletionOutput) -> str | None:
        """Return OpenAI's reason. A call of a named tool ends with "stop" there."""
        has_calls = self._scanners is not None and self._scanners[index].num_calls > 0
        if has_calls and not self._is_named and output.finish_reason == "stop":
            return "tool_calls"
        return output.finish_reason

    def _logprobs(self, output: CompletionOutput) -> dict[str, object] | None:
        if output.logprobs is None:
            return None
        return chat_logprobs(
            output.token_ids,
            output.logprobs,
            self._tokenizer,
            self._body.top_logprobs or 0,
            as_ids=bool(self._body.return_tokens_as_token_ids),
        )
