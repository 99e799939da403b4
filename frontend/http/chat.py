"""/v1/chat/completions: the handler, and the form of its answers."""

import secrets
import time
from typing import Any

import msgspec

from frontend.http.answer_format import EVENT_STREAM, PromptSide, error_event, event, json_bytes
from frontend.http.bodies import ChatBody
from frontend.http.errors import HttpError
from frontend.http.logprobs import chat_logprobs, prompt_logprobs
from frontend.http.reply import Reply
from frontend.http.request import Request
from frontend.http.sampling import read_sampling
from frontend.http.service import Service
from frontend.http.usage import Usage
from frontend.results.outputs import CompletionOutput
from frontend.session import PreparedRequest

_decoder = msgspec.json.Decoder(ChatBody)
MAX_MESSAGES = 4096
MAX_TOOLS = 128


async def create_chat_completion(service: Service, request: Request) -> Reply:
    """Answer a chat."""
    body = request.decode(_decoder)
    name = service.check_model(request, body.model)
    prepared = await prepare_chat(service, request, body)
    return service.submit(request, prepared, ChatFormat(service, body, name, prepared[0]))


async def prepare_chat(service: Service, request: Request, body: ChatBody) -> list[PreparedRequest]:
    """Render and tokenize a chat. Errors: HttpError, InvalidRequestError."""
    if len(body.messages) > MAX_MESSAGES:
        raise HttpError(400, f"{len(body.messages)} messages; {MAX_MESSAGES} are allowed", param="messages")
    if body.tools and len(body.tools) > MAX_TOOLS:
        raise HttpError(400, f"{len(body.tools)} tools; {MAX_TOOLS} are allowed", param="tools")
    if body.chat_template is not None and not service.options.allow_request_templates:
        raise HttpError(400, "chat_template is a program: this server takes none from requests", param="chat_template")
    if body.tool_choice not in (None, "auto", "none"):
        raise HttpError(400, "tool_choice is not supported but for auto and none", param="tool_choice")
    if body.max_tokens is None:
        body.max_tokens = body.max_completion_tokens
    if body.top_logprobs and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = read_sampling(body, service.default_sampling, max_tokens=None, logprobs=logprobs)
    tools = body.tools if body.tools and body.tool_choice != "none" else None

    def prepare() -> list[PreparedRequest]:
        kwargs: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        if body.documents is not None:
            kwargs.setdefault("documents", body.documents)
        continues = bool(body.continue_final_message)
        (prompt,) = service.engine.render_chats(
            [body.messages],
            chat_template=body.chat_template,
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            tools=tools,
            kwargs=kwargs,
        )
        return service.prepare(request, body, [prompt], params, add_special_tokens=False)

    return await service.run(request, prepare)


class ChatFormat:
    """Answers of /v1/chat/completions."""

    stream_type = EVENT_STREAM
    keep_alive = b": keep-alive\n\n"

    def __init__(self, service: Service, body: ChatBody, name: str, prepared: PreparedRequest) -> None:
        self._tokenizer = service.engine.tokenizer
        self._body = body
        self._n = prepared.params.n
        self._fields = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": service.fingerprint,
        }
        options = body.stream_options
        self._shows_usage = bool(options and options.include_usage) or service.options.include_usage
        self._counts_always = bool(options and options.include_usage and options.continuous_usage_stats)
        self._is_plain = not body.logprobs and not self._counts_always and not body.return_token_ids
        self._heads = [b""] * self._n
        if body.stream and self._is_plain:
            begin = b"data: " + json_bytes(self._fields)[:-1]
            self._heads = [b'%b,"choices":[{"index":%d,"delta":{"content":' % (begin, i) for i in range(self._n)]

    def opening(self) -> bytes:
        """Return the role of each choice."""
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(self._n)]
        return b"".join(event({**self._fields, "choices": [choice]}) for choice in choices)

    def piece(self, index: int, output: CompletionOutput, usage: Usage) -> bytes:
        """Return the events of a choice's new text and of its end."""
        events = b""
        if self._is_plain:
            if output.text:
                text = json_bytes(output.text)
                events = b'%b%b},"logprobs":null,"finish_reason":null}]}\n\n' % (self._heads[index], text)
        elif output.text or output.token_ids:
            events = self._event(index, output, usage)
        if output.finish_reason is None:
            return events
        end = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        return events + self._chunk({"index": index, "delta": {}, "logprobs": None, **end}, usage)

    def closing(self, usage: Usage) -> bytes:
        """Return the usage, where it was asked for, and the end of the stream."""
        counts = event({**self._fields, "choices": [], "usage": usage.openai()}) if self._shows_usage else b""
        return counts + b"data: [DONE]\n\n"

    def failure(self, error: HttpError) -> bytes:
        """Return the error and the end of the stream."""
        return error_event(error)

    def whole(self, choices: list[CompletionOutput], prompts: list[PromptSide], usage: Usage) -> bytes:
        """Return the body of a whole answer."""
        shown = []
        for index, output in enumerate(choices):
            choice = {
                "index": index,
                "message": {"role": "assistant", "content": output.text},
                "logprobs": self._logprobs(output),
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
            }
            if self._body.return_token_ids:
                choice["token_ids"] = output.token_ids
            shown.append(choice)
        more: dict[str, object] = {}
        if self._body.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(prompts[0].logprobs)
        if self._body.return_token_ids:
            more["prompt_token_ids"] = prompts[0].token_ids
        return json_bytes({**self._fields, "choices": shown, "usage": usage.openai(), **more})

    def _event(self, index: int, output: CompletionOutput, usage: Usage) -> bytes:
        choice: dict[str, object] = {
            "index": index,
            "delta": {"content": output.text},
            "logprobs": self._logprobs(output),
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = output.token_ids
        return self._chunk(choice, usage)

    def _chunk(self, choice: dict[str, object], usage: Usage) -> bytes:
        more = {"usage": usage.openai()} if self._counts_always else {}
        return event({**self._fields, "choices": [choice], **more})

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
