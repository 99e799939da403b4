"""/v1/completions: the handler, and the form of its answers."""

import secrets
import time
from collections.abc import Sequence

import msgspec

from frontend.http.answer_format import EVENT_STREAM, PromptSide, error_event, event, json_bytes
from frontend.http.bodies import CompletionBody
from frontend.http.errors import HttpError
from frontend.http.logprobs import Position, completion_logprobs, prompt_logprobs
from frontend.http.reply import Reply
from frontend.http.request import Request
from frontend.http.sampling import read_sampling
from frontend.http.service import Service
from frontend.http.usage import Usage
from frontend.results.outputs import CompletionOutput
from frontend.session import PreparedRequest
from frontend.text.prompts import PromptInput, split_prompts
from frontend.text.tokenizer import Tokenizer

_decoder = msgspec.json.Decoder(CompletionBody)
_MAX_TOKENS = 16  # OpenAI's default
MAX_PROMPTS = 2048


async def create_completion(service: Service, request: Request) -> Reply:
    """Complete one prompt or many."""
    body = request.decode(_decoder)
    name = service.check_model(request, body.model)
    if body.prompt is None or body.prompt == []:
        raise HttpError(400, "prompt is missing: send a text, texts, token ids or lists of token ids", param="prompt")
    has_only_echo = bool(body.echo) and body.max_tokens == 0
    if has_only_echo:
        body.max_tokens = 1  # the engine makes at least one token; it is not shown
    params = read_sampling(body, service.default_sampling, max_tokens=_MAX_TOKENS, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise HttpError(400, "echo with logprobs cannot be streamed: leave out stream", param="echo")
        params.prompt_logprobs = body.logprobs

    def prepare() -> list[PreparedRequest]:
        prompts: list[PromptInput] = split_prompts(body.prompt)  # type: ignore[arg-type]
        if len(prompts) > MAX_PROMPTS:
            raise HttpError(400, f"{len(prompts)} prompts in one request; {MAX_PROMPTS} are allowed", param="prompt")
        special = body.add_special_tokens is not False
        return service.prepare(request, body, prompts, params, add_special_tokens=special)

    prepared = await service.run(request, prepare)
    answer = CompletionFormat(service, body, name, prepared, drops_output=has_only_echo)
    return service.submit(request, prepared, answer)


class CompletionFormat:
    """Answers of /v1/completions."""

    stream_type = EVENT_STREAM
    keep_alive = b": keep-alive\n\n"

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        name: str,
        prepared: list[PreparedRequest],
        *,
        drops_output: bool,
    ) -> None:
        self._tokenizer = service.engine.tokenizer
        self._body = body
        self._n = prepared[0].params.n
        self._num_choices = len(prepared) * self._n
        self._prompts = [one.prompt for one in prepared]
        self._drops_output = drops_output
        self._offsets = [0] * self._num_choices  # characters of each choice so far, for text_offset
        self._fields = {
            "id": f"cmpl-{secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": service.fingerprint,
        }
        options = body.stream_options
        self._shows_usage = bool(options and options.include_usage) or service.options.include_usage
        self._counts_always = bool(options and options.include_usage and options.continuous_usage_stats)
        self._is_plain = body.logprobs is None and not self._counts_always and not body.return_token_ids
        self._heads = [b""] * self._num_choices
        if body.stream and self._is_plain:
            begin = b"data: " + json_bytes(self._fields)[:-1]
            self._heads = [b'%b,"choices":[{"index":%d,"text":' % (begin, i) for i in range(self._num_choices)]

    def opening(self) -> bytes:
        """Return the prompts, where they are to be echoed."""
        if not self._body.echo:
            return b""
        texts = [self._prompt_text(index // self._n) for index in range(self._num_choices)]
        return b"".join(self._event({"index": index, "text": text}) for index, text in enumerate(texts))

    def piece(self, index: int, output: CompletionOutput, usage: Usage) -> bytes:
        """Return the event of a choice's new text."""
        if output.finish_reason is None and self._is_plain:
            if not output.text:
                return b""
            return b'%b%b,"logprobs":null,"finish_reason":null}]}\n\n' % (self._heads[index], json_bytes(output.text))
        choice = self._choice(index, output)
        more = {"usage": usage.openai()} if self._counts_always else {}
        return event({**self._fields, "choices": [choice], **more})

    def closing(self, usage: Usage) -> bytes:
        """Return the usage, where it was asked for, and the end of the stream."""
        counts = event({**self._fields, "choices": [], "usage": usage.openai()}) if self._shows_usage else b""
        return counts + b"data: [DONE]\n\n"

    def failure(self, error: HttpError) -> bytes:
        """Return the error and the end of the stream."""
        return error_event(error)

    def whole(self, choices: list[CompletionOutput], prompts: list[PromptSide], usage: Usage) -> bytes:
        """Return the body of a whole answer."""
        if self._drops_output:
            usage.completion_tokens = 0
        shown = [self._whole_choice(index, one, prompts[index // self._n]) for index, one in enumerate(choices)]
        return json_bytes({**self._fields, "choices": shown, "usage": usage.openai()})

    def _whole_choice(self, index: int, output: CompletionOutput, prompt: PromptSide) -> dict[str, object]:
        if self._drops_output:
            output.text, output.token_ids, output.finish_reason = "", [], "length"
            output.logprobs = None if output.logprobs is None else []
        text, before = output.text, list[Position]()
        if self._body.echo:
            text = self._prompt_text(index // self._n) + text
            if self._body.logprobs is not None and prompt.logprobs is not None:
                before = list(zip(prompt.token_ids, prompt.logprobs, strict=True))
        choice = self._choice(index, output, before)
        choice["text"] = text
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(prompt.logprobs)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = prompt.token_ids
        return choice

    def _choice(self, index: int, output: CompletionOutput, before: Sequence[Position] = ()) -> dict[str, object]:
        logprobs = None
        if output.logprobs is not None:
            rows = [*before, *zip(output.token_ids, output.logprobs, strict=True)]
            as_ids = bool(self._body.return_tokens_as_token_ids)
            logprobs = completion_logprobs(rows, self._tokenizer, self._offsets[index], as_ids=as_ids)
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        choice: dict[str, object] = {
            "index": index,
            "text": output.text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _event(self, choice: dict[str, object]) -> bytes:
        return event({**self._fields, "choices": [{**choice, "logprobs": None, "finish_reason": None}]})

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index]
        return prompt.text if prompt.text is not None else _decode(self._tokenizer, prompt.token_ids)


def _decode(tokenizer: Tokenizer | None, ids: list[int]) -> str:
    return "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
