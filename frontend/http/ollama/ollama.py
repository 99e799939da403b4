"""Ollama's API: /api/chat and /api/generate as lines of JSON, and its programs' calls about a server and its models.

Models cannot be pulled, deleted or unloaded here, and a prompt is never cut to num_ctx.
"""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from frontend.calls.delta import Delta, Kind
from frontend.calls.parsed import ParsedAnswer, WholeCall
from frontend.http.bodies import ChatBody, CompletionBody, Json
from frontend.http.chat_request import PreparedChat, behind, prepare_chat
from frontend.http.errors import HttpError
from frontend.http.ollama.ollama_bodies import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    sampling_fields,
    with_parts,
)
from frontend.http.openai.logprobs import chat_logprobs
from frontend.http.replies.answer_format import PromptSide, json_bytes
from frontend.http.replies.reply import Reply
from frontend.http.replies.usage import Usage
from frontend.http.request import Request, Response
from frontend.http.sampling import read_sampling
from frontend.http.service import Service
from frontend.http.whole_numbers import convert
from frontend.results.outputs import CompletionOutput
from frontend.session import PreparedRequest
from ipc.wire.messages import ModelDescription

_Body = TypeVar("_Body", ChatBody, CompletionBody)
_TAG = ":latest"
#: The first version of Ollama with all of these APIs: log probabilities came with 0.12.11, /v1/responses with 0.13.3,
#: /v1/messages with 0.14.0. Programs require a minimum: VS Code 0.6.4, Codex 0.13.4.
_VERSION = "0.14.0"
_ARCHITECTURE = "engine-core"  # of a model without files; the context's length is read under the architecture's name
_chat_decoder = msgspec.json.Decoder(OllamaChatBody)
_generate_decoder = msgspec.json.Decoder(OllamaGenerateBody)


class _ShowBody(msgspec.Struct):
    model: str | None = None
    name: str | None = None


class _PullBody(_ShowBody):
    stream: bool = True
    insecure: bool = False


_pull_decoder = msgspec.json.Decoder(_PullBody)
_show_decoder = msgspec.json.Decoder(_ShowBody)


async def chat(service: Service, request: Request) -> Reply | Response:
    """Answer a chat."""
    given = request.decode(_chat_decoder)
    name = service.check_model(request, given.model.removesuffix(_TAG))
    if not given.messages:
        return _loaded(name, {"message": {"role": "assistant", "content": ""}})
    body = _chat_body(service, given, [with_parts(message) for message in given.messages], given.tools)
    prepared = await prepare_chat(service, request, body)
    answer = OllamaFormat(name, request, prepared, _logprobs_of(service, given), is_chat=True)
    return await service.submit(request, prepared.requests, answer)


async def generate(service: Service, request: Request) -> Reply | Response:
    """Answer a prompt: as a chat of one message, or with raw=true unchanged."""
    given = request.decode(_generate_decoder)
    name = service.check_model(request, given.model.removesuffix(_TAG))
    for field in ("suffix", "template", *(("images",) if given.raw else ())):
        if getattr(given, field):
            raise HttpError(400, f"{field} is not supported {'with raw ' * (field == 'images')}here", param=field)
    if not given.prompt and not given.images:
        return _loaded(name, {"response": ""})
    if given.raw:
        fields = sampling_fields(given, service.max_model_len, service.meter.note_left_out)
        body = _convert(CompletionBody, {**fields, "prompt": given.prompt or ""})
        logprobs = (given.top_logprobs or 0) if given.logprobs else None

        def prepare() -> list[PreparedRequest]:
            params = read_sampling(body, service.default_sampling, max_tokens=None, logprobs=logprobs)
            prompt = behind(service, given.context, given.prompt or "")
            return service.prepare(request, body, [prompt], params, add_special_tokens=True)

        prepared = PreparedChat(await service.run(request, prepare))
    else:
        system: list[Json] = [{"role": "system", "content": given.system}] if given.system else []
        messages = [*system, with_parts({"role": "user", "content": given.prompt or "", "images": given.images})]
        prepared = await prepare_chat(service, request, _chat_body(service, given, messages, None), given.context)
    answer = OllamaFormat(name, request, prepared, _logprobs_of(service, given), is_chat=False)
    return await service.submit(request, prepared.requests, answer)


async def list_tags(service: Service, request: Request) -> Response:
    """List the model's names."""
    return Response(json_bytes({"models": [_card(service, name) for name in service.names_for(request)]}))


async def list_running(service: Service, request: Request) -> Response:
    """List the loaded models: always this one."""
    more = {"expires_at": "9999-12-31T00:00:00Z", "size_vram": 0, "context_length": service.max_model_len}
    cards = [{**_card(service, name), **more} for name in service.names_for(request)]
    return Response(json_bytes({"models": cards}))


async def show(service: Service, request: Request) -> Response:
    """Describe the model."""
    body = request.decode(_show_decoder)
    name = service.check_model(request, (body.model or body.name or "").removesuffix(_TAG))
    tokenizer, length = service.engine.tokenizer, service.max_model_len
    model = service.engine.client.welcome.description or ModelDescription()
    family = model.family or _ARCHITECTURE
    lengths = {"general.context_length": length, f"{family}.context_length": length}
    answer = {
        "template": tokenizer.chat_template or "" if tokenizer is not None else "",
        "details": _card(service, name)["details"],
        "modified_at": _card(service, name)["modified_at"],
        "parameters": "\n".join(f"{option:30} {value}" for option, value in service.default_sampling.items()),
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            "general.parameter_count": model.num_parameters,
            **lengths,
        },
        "capabilities": service.capabilities,
    }
    return Response(json_bytes(answer))


def _loaded(name: str, content: Json) -> Response:
    """Return the answer to a request without a prompt, with which Ollama's programs load or unload a model.

    The model always stays loaded.
    """
    return Response(json_bytes({"model": name, "created_at": _now(), **content, "done": True, "done_reason": "load"}))


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


async def get_version(service: Service, request: Request) -> Response:
    """Return the version of Ollama with this API."""
    return Response(json_bytes({"version": _VERSION}))


async def pull(service: Service, request: Request) -> Response:
    """Say that a model that is served is up to date. Programs pull what they are told to use (Codex: a name without
    its tag).

    Errors: HttpError 501 for another model.
    """
    body = request.decode(_pull_decoder)
    if (body.model or body.name or "").removesuffix(_TAG) not in service.names_for(request):
        return await refuse(service, request)
    return Response(json_bytes({"status": "success"}) + b"\n", content_type=OllamaFormat.stream_type)


async def refuse(service: Service, request: Request) -> Response:
    """Refuse changes of a server's models."""
    raise HttpError(501, "this server serves the model that it was started with; only its operator can change that")


def error_body(error: HttpError) -> bytes:
    """Return the body of an error in Ollama's form, in which "error" is a text."""
    return json_bytes({"error": error.fields()["message"]})


class OllamaFormat:
    """Answers of /api/chat and /api/generate."""

    stream_type = b"application/x-ndjson"
    keep_alive = b""  # there is no line that all of its clients skip

    def __init__(
        self,
        name: str,
        request: Request,
        prepared: PreparedChat,
        logprobs_of: Callable[[CompletionOutput], Json],
        *,
        is_chat: bool,
    ) -> None:
        self._name = name
        self._logprobs_of = logprobs_of
        self._answer = ParsedAnswer(prepared.scanners[0] if prepared.scanners else None)
        self._is_chat = is_chat
        self._context = [] if is_chat else list(prepared.requests[0].prompt.token_ids)
        self._reason = "stop"
        self._received, self._began = request.received_at, time.monotonic()  # seconds
        self._first = 0.0

    def opening(self) -> bytes:
        """Return nothing: a stream begins with its first tokens."""
        return b""

    def piece(self, index: int, output: CompletionOutput, usage: Usage) -> bytes:
        """Return a line for each new part of the answer."""
        self._first = self._first or time.monotonic()
        if not self._is_chat:
            self._context += output.token_ids
        self._reason = output.finish_reason or self._reason
        parts = self._answer.feed(output.text, is_end=output.finish_reason is not None)
        fields, logprobs = [_fields([part]) for part in parts], self._logprobs_of(output)
        if logprobs.get("logprobs") and not fields:
            fields = [_fields([])]
        more = [logprobs, *[{}] * len(fields)]  # the first line has the tokens' data
        return b"".join(self._line(one, {"done": False, **more[at]}) for at, one in enumerate(fields))

    def closing(self, usage: Usage) -> bytes:
        """Return the last line, with the counts."""
        return self._line(_fields([]), self._end(usage))

    def failure(self, error: HttpError) -> bytes:
        """Return the line of an error."""
        return error_body(error) + b"\n"

    def whole(self, choices: list[CompletionOutput], prompts: Sequence[PromptSide], usage: Usage) -> bytes:
        """Return the body of a whole answer."""
        self._reason = choices[0].finish_reason or self._reason
        self._first = usage.first_token_time
        if not self._is_chat:
            self._context += choices[0].token_ids
        fields = _fields(self._answer.feed(choices[0].text, is_end=True))
        return self._line(fields, {**self._end(usage), **self._logprobs_of(choices[0])})

    def _line(self, fields: Json, more: Json) -> bytes:
        shown: Json = {"message": {"role": "assistant", **fields}}
        if not self._is_chat:
            shown = {("response" if name == "content" else name): value for name, value in fields.items()}
        return json_bytes({"model": self._name, "created_at": _now(), **shown, **more}) + b"\n"

    def _end(self, usage: Usage) -> Json:
        """Return the counts and the times, in nanoseconds. Loading is the time before the engine has the request."""
        now = time.monotonic()
        first = self._first or now
        return {
            **({} if self._is_chat else {"context": self._context}),
            "done": True,
            "done_reason": self._reason,
            "total_duration": _ns(now - self._received),
            "load_duration": _ns(self._began - self._received),
            "prompt_eval_count": usage.prompt_tokens,
            **usage.pinned(),
            "prompt_eval_duration": _ns(first - self._began),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(now - first),
            **usage.proof(),
        }


def _ns(seconds: float) -> int:
    return max(1, round(seconds * 1e9))  # programs divide by them


def _fields(parts: list[Delta | WholeCall]) -> Json:
    """Return the fields of a message with these parts."""
    texts = {Kind.CONTENT: "", Kind.REASONING: ""}
    calls: list[Json] = []
    for part in parts:
        if isinstance(part, WholeCall):
            calls.append({"function": {"name": part.name, "arguments": part.arguments}})
        else:
            texts[part.kind] += part.text
    thinking = {"thinking": texts[Kind.REASONING]} if texts[Kind.REASONING] else {}
    return {"content": texts[Kind.CONTENT], **thinking, **({"tool_calls": calls} if calls else {})}


def _logprobs_of(service: Service, given: OllamaBody) -> Callable[[CompletionOutput], Json]:
    """Return how to show the log probabilities of an output's tokens; nothing if none were requested."""
    tokenizer, num_top = service.engine.tokenizer, given.top_logprobs or 0

    def show(output: CompletionOutput) -> Json:
        if output.logprobs is None:
            return {}
        return {
            "logprobs": chat_logprobs(output.token_ids, output.logprobs, tokenizer, num_top, as_ids=False)["content"]
        }

    return show


def _chat_body(service: Service, given: OllamaBody, messages: list[Json], tools: list[Json] | None) -> ChatBody:
    fields = sampling_fields(given, service.max_model_len, service.meter.note_left_out)
    fields |= {"logprobs": given.logprobs, "top_logprobs": given.top_logprobs}
    kwargs = {} if given.think is None else {"enable_thinking": bool(given.think)}
    return _convert(ChatBody, {**fields, "messages": messages, "tools": tools, "chat_template_kwargs": kwargs})


def _convert(kind: type[_Body], fields: Json) -> _Body:
    try:
        return convert(fields, kind)
    except msgspec.ValidationError as error:
        raise HttpError(400, str(error)) from None


def _human(count: int) -> str:
    """Return a number of parameters as Ollama writes it: 8B, 1.2B, 134.52M; "" for none."""
    for unit, size, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if count >= size:
            return f"{count / size:.{0 if count % size == 0 else digits}f}{unit}"
    return str(count) if count else ""


def _card(service: Service, name: str) -> Json:
    model = service.engine.client.welcome.description or ModelDescription()
    return {
        "name": name if ":" in name else f"{name}{_TAG}",  # Ollama's programs look for a name with its tag
        "model": name if ":" in name else f"{name}{_TAG}",
        "modified_at": datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
        "size": model.num_bytes,
        "digest": service.engine.client.welcome.model_fingerprint,
        "details": {
            "parent_model": "",
            "format": model.format or _ARCHITECTURE,
            "family": model.family,
            "families": [model.family] if model.family else [],
            "parameter_size": _human(model.num_parameters),
            "quantization_level": model.quantization,
        },
    }
