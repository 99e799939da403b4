"""/v1/completions: the handler, and the form of its answers."""

from collections.abc import Iterable, Sequence
from itertools import chain

import msgspec

from frontend.http.bodies import CompletionBody
from frontend.http.errors import HttpError
from frontend.http.openai.logprobs import CompletionColumns, CompletionLogprobs, Position, columns_of, prompt_logprobs
from frontend.http.openai.openai_answer import OpenAIAnswer
from frontend.http.openai.prompt_embeds import read_prompt_embeds
from frontend.http.replies.answer_format import EchoingFormat, PromptSide, event, json_bytes
from frontend.http.replies.reply import Reply
from frontend.http.replies.text_frames import TextFrames
from frontend.http.replies.usage import Usage
from frontend.http.request import Request
from frontend.http.sampling import read_sampling
from frontend.http.service import Service
from frontend.results.outputs import CompletionOutput
from frontend.session import PreparedRequest
from frontend.text.prompt_forms import PromptInput
from frontend.text.prompts import split_prompts
from frontend.text.tokenizer import Tokenizer
from ipc.params.sampling_params import SamplingParams

_PLAIN_TAIL = b',"logprobs":null,"finish_reason":null}]}\n\n'
_decoder = msgspec.json.Decoder(CompletionBody)
_MAX_TOKENS = 16  # OpenAI's default
MAX_PROMPTS = 2048
MAX_EMBEDS_BYTES = 1 << 20  # of a prompt for an engine that takes none, which says so


async def create_completion(service: Service, request: Request) -> Reply:
    """Complete one prompt or many."""
    body = request.decode(_decoder)
    name = service.check_model(request, body.model)
    embeds, body.prompt_embeds = _embeds_of(service, body), None
    if not embeds and (body.prompt is None or body.prompt == []):
        raise HttpError(400, "prompt is missing: send a text, texts, token ids or lists of token ids", param="prompt")
    has_only_echo = bool(body.echo) and body.max_tokens == 0
    if has_only_echo:
        body.max_tokens = 1  # the engine generates at least one token; it is not shown
    if has_only_echo and body.receipt:
        raise HttpError(400, "an echo alone has no receipt: leave out receipt, or ask for tokens", param="receipt")

    def prepare() -> list[PreparedRequest]:
        params = _read_params(service, body)
        limits = service.engine.client.welcome.features
        most = MAX_EMBEDS_BYTES if limits is None else limits.max_bytes
        prompts: list[PromptInput] = [{"prompt_embeds": read_prompt_embeds(one, most)} for one in embeds]
        if body.prompt or not embeds:
            prompts += split_prompts(body.prompt)  # type: ignore[arg-type]
        if len(prompts) > MAX_PROMPTS:
            raise HttpError(
                400, f"{len(prompts)} prompts in one request; at most {MAX_PROMPTS} are allowed", param="prompt"
            )
        special = body.add_special_tokens is not False
        return service.prepare(request, body, prompts, params, add_special_tokens=special)

    prepared = await service.run(request, prepare, is_long=bool(embeds))
    answer = CompletionFormat(service, body, name, prepared, drops_output=has_only_echo)
    return await service.submit(request, prepared, answer)


def _read_params(service: Service, body: CompletionBody) -> SamplingParams:
    """Return the parameters of a body. Errors: HttpError, InvalidRequestError."""
    params = read_sampling(body, service.default_sampling, max_tokens=_MAX_TOKENS, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None:
        if body.stream and params.n > 1:
            raise HttpError(400, "n choices with echo and logprobs cannot be streamed: leave out stream", param="echo")
        params.prompt_logprobs = body.logprobs
    return params


def _embeds_of(service: Service, body: CompletionBody) -> list[str]:
    """Return the prompts of a body that are embeddings. Errors: HttpError 400."""
    if not body.prompt_embeds:
        return []
    if not service.options.enable_prompt_embeds:
        text = "prompt_embeds is not supported by this server: it is started without --enable-prompt-embeds"
        raise HttpError(400, text, param="prompt_embeds")
    if body.echo:
        raise HttpError(400, "a prompt of embeddings has no text to echo: leave out echo", param="echo")
    return [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds


class CompletionFormat(OpenAIAnswer, EchoingFormat):
    """Answers of /v1/completions."""

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        name: str,
        prepared: list[PreparedRequest],
        *,
        drops_output: bool,
    ) -> None:
        super().__init__(service, body, prefix="cmpl", kind="text_completion", name=name)
        self._body = body
        self._params = prepared[0].params
        self._n = prepared[0].params.n
        self._num_choices = len(prepared) * self._n
        self._prompts = [one.prompt for one in prepared]
        self._drops_output = drops_output
        self._begun = set[int]()  # choices that have had an event
        self._offsets = [0] * self._num_choices  # characters of each choice so far, for text_offset
        says_more = bool(self._counts_always or body.return_token_ids)
        self._is_plain = body.logprobs is None and not says_more
        self.echoes = bool(body.stream and body.echo) and body.logprobs is not None
        is_plain = body.stream and self._is_plain and not drops_output
        self._plain_heads = self._heads(self._num_choices, b'"text":') if is_plain else []

    def opening(self) -> bytes:
        """Return the prompts, if they are echoed without log probabilities."""
        if not self._body.echo or self.echoes:
            return b""
        texts = [self._prompt_text(index // self._n) for index in range(self._num_choices)]
        return b"".join(self._event({"index": index, "text": text}) for index, text in enumerate(texts))

    def prompt_piece(self, index: int, prompt: PromptSide) -> bytes:
        """Return a prompt and its log probabilities."""
        logprobs = None
        if prompt.logprobs is not None:
            logprobs = self._logprobs(index, zip(prompt.token_ids, prompt.logprobs, strict=True))
        choice = {"index": index, "text": self._prompt_text(index // self._n), "logprobs": logprobs}
        return event({**self._fields, "choices": [{**choice, "finish_reason": None}]})

    def piece(self, index: int, output: CompletionOutput, usage: Usage) -> bytes:
        """Return the event of a choice's new text."""
        if self._drops_output:
            if output.finish_reason is None:
                return b""
            usage.completion_tokens = 0
            _drop(output)
            return self._chunk(self._choice(index, output), usage)
        if output.finish_reason is None and self._is_plain:
            if not output.text:
                return b""
            return self._plain_heads[index] + json_bytes(output.text) + _PLAIN_TAIL
        choice = self._choice(index, output)
        if self._body.return_token_ids and index not in self._begun:  # the first event of a choice has its prompt
            self._begun.add(index)
            choice["prompt_token_ids"] = self._prompts[index // self._n].token_ids
        return self._chunk(choice, usage)

    def text_frames(self) -> TextFrames | None:
        """Return the frames of plain events."""
        return self._frames(self._plain_heads, _PLAIN_TAIL, self._params)

    def whole(self, choices: list[CompletionOutput], prompts: Sequence[PromptSide], usage: Usage) -> bytes:
        """Return the body of a whole answer."""
        if self._drops_output:
            usage.completion_tokens = 0
        shown = [self._whole_choice(index, one, prompts[index // self._n]) for index, one in enumerate(choices)]
        return json_bytes({**self._fields, "choices": shown, "usage": usage.openai(), **usage.proof()})

    def _whole_choice(self, index: int, output: CompletionOutput, prompt: PromptSide) -> dict[str, object]:
        if self._drops_output:
            _drop(output)
        text = output.text
        before: Iterable[Position] = ()
        if self._body.echo:
            text = self._prompt_text(index // self._n) + text
            if self._body.logprobs is not None and prompt.logprobs is not None:
                before = zip(prompt.token_ids, prompt.logprobs, strict=True)
        choice = self._choice(index, output, before)
        choice["text"] = text
        is_asked = self._body.prompt_logprobs is not None
        choice["prompt_logprobs"] = prompt_logprobs(prompt.logprobs) if is_asked else None
        choice["prompt_token_ids"] = prompt.token_ids if self._body.return_token_ids else None
        choice.setdefault("token_ids", None)
        return choice

    def _choice(self, index: int, output: CompletionOutput, before: Iterable[Position] = ()) -> dict[str, object]:
        logprobs = None
        if output.logprobs is not None:
            logprobs = self._logprobs(index, chain(before, zip(output.token_ids, output.logprobs, strict=True)))
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

    def _logprobs(self, index: int, positions: Iterable[Position]) -> CompletionLogprobs | CompletionColumns:
        as_ids = bool(self._body.return_tokens_as_token_ids)
        logprobs, self._offsets[index] = columns_of(positions, self._tokenizer, self._offsets[index], as_ids=as_ids)
        return logprobs

    def _event(self, choice: dict[str, object]) -> bytes:
        return event({**self._fields, "choices": [{**choice, "logprobs": None, "finish_reason": None}]})

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index]
        return prompt.text if prompt.text is not None else _decode(self._tokenizer, prompt.token_ids)


def _drop(output: CompletionOutput) -> None:
    """Leave out the one token that the engine always generates."""
    output.text, output.token_ids, output.finish_reason = "", [], "length"
    output.logprobs = None if output.logprobs is None else []


def _decode(tokenizer: Tokenizer | None, ids: list[int]) -> str:
    return "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
