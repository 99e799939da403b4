"""llama.cpp's own routes: /completion and /infill, /apply-template, and what its programs ask of a server.

There are no slots: a request runs with all others, and every prompt's beginning is cached for all.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from frontend.http.bodies import ChatBody, Json
from frontend.http.chat_request import render_text
from frontend.http.errors import HttpError, retry_after
from frontend.http.llama_cpp.llama_cpp_bodies import (
    InfillBody,
    LlamaCppBody,
    chosen_fields,
    completion_of,
    infill_prompt,
    read_prompt,
    split,
)
from frontend.http.openai.completions import MAX_PROMPTS
from frontend.http.openai.logprobs import chat_logprobs
from frontend.http.replies.answer_format import EVENT_STREAM, PromptSide, event, json_bytes
from frontend.http.replies.reply import Reply
from frontend.http.replies.usage import Usage
from frontend.http.request import Request, Response
from frontend.http.sampling import read_sampling
from frontend.http.service import Service
from frontend.results.outputs import CompletionOutput
from frontend.session import PreparedRequest
from frontend.text.prompt_forms import PromptInput
from ipc.params.sampling_params import NUMBERS, SamplingParams
from ipc.version import VERSION

_decoder = msgspec.json.Decoder(LlamaCppBody)
_infill_decoder = msgspec.json.Decoder(InfillBody)
_chat_decoder = msgspec.json.Decoder(ChatBody)
_STOP_TYPES = {"stop": "eos", "length": "limit"}  # of choices that no stop string has ended


async def create_completion(service: Service, request: Request) -> Reply:
    """Complete one prompt or many in llama.cpp's form."""
    body = request.decode(_decoder)
    prompts = split(body.prompt)
    if len(prompts) > MAX_PROMPTS:
        raise HttpError(400, f"{len(prompts)} prompts in one request; {MAX_PROMPTS} are allowed", param="prompt")
    if body.stream and len(prompts) > 1:
        raise HttpError(400, "several prompts cannot be streamed: leave out stream", param="stream")
    encode = partial(_encode, service)
    return await _complete(service, request, body, lambda: [read_prompt(one, encode) for one in prompts])


async def infill(service: Service, request: Request) -> Reply:
    """Fill in the code between a prefix and a suffix."""
    body = request.decode(_infill_decoder)
    encode = partial(_encode, service)
    return await _complete(service, request, body, lambda: [infill_prompt(body, service.tokenizer, encode)])


async def _complete(
    service: Service, request: Request, body: LlamaCppBody, prompts_of: Callable[[], Sequence[PromptInput]]
) -> Reply:
    name = service.check_model(request, body.model)
    completion, has_no_output = completion_of(body, service.engine.tokenizer)
    if has_no_output and body.receipt:
        raise HttpError(400, "an answer without tokens has no receipt: leave out receipt", param="receipt")

    def prepare() -> list[PreparedRequest]:
        params = read_sampling(completion, service.default_sampling, max_tokens=None, logprobs=body.n_probs or None)
        return service.prepare(request, completion, prompts_of(), params, add_special_tokens=True)

    prepared = await service.run(request, prepare)
    answer = LlamaCppFormat(service, request, body, name, prepared=prepared, has_no_output=has_no_output)
    return await service.submit(request, prepared, answer)


def _encode(service: Service, text: str, special: bool) -> list[int]:
    """Return the token ids of a text. special: with the model's special tokens around it. Errors: HttpError 400."""
    service.check_countable(text)
    return service.tokenizer.encode(text, add_special_tokens=special)


class LlamaCppFormat:
    """Answers of /completion and /infill."""

    stream_type = EVENT_STREAM
    keep_alive = b": keep-alive\n\n"

    def __init__(
        self,
        service: Service,
        request: Request,
        body: LlamaCppBody,
        name: str,
        *,
        prepared: Sequence[PreparedRequest],
        has_no_output: bool,
    ) -> None:
        self._tokenizer = service.engine.tokenizer
        self._body, self._name, self._has_no_output = body, name, has_no_output
        self._params = prepared[0].params
        self._n = self._params.n
        self._prompts = [one.prompt for one in prepared]
        self._settings = settings_of(self._params, service.max_model_len, name)
        self._began = request.received_at  # monotonic seconds
        self._first = 0.0
        self._num_made = [0] * (len(prepared) * self._n)  # tokens of each choice of a stream
        self._has_line = [False] * len(self._num_made)

    def opening(self) -> bytes:
        """Return nothing: a stream begins with its first tokens."""
        return b""

    def piece(self, index: int, output: CompletionOutput, usage: Usage) -> bytes:
        """Return the event of a choice's new text, and at its end that of all which is said of it."""
        self._first = self._first or time.monotonic()
        ended = output.finish_reason is not None
        if self._has_no_output and ended:
            _drop(output)
        self._num_made[index] += len(output.token_ids)
        self._has_line[index] |= "\n" in output.text
        events = b""
        if output.token_ids or output.text:
            shown: Json = {
                **self._counts(index, output.text, output.token_ids),
                "stop": False,
                **self._probabilities(output),
            }
            if self._body.timings_per_token:
                shown["timings"] = self._timings(index, usage.cached_tokens)
            events = event(shown)
        return events + event(self._chosen(self._end(index, output, usage.cached_tokens, "", []))) if ended else events

    def closing(self, usage: Usage) -> bytes:
        """Return the receipts, if there are any: the last event of a choice ends it."""
        return event(usage.proof()) if usage.receipts else b""

    def failure(self, error: HttpError) -> bytes:
        """Return the event of an error."""
        return event({"error": error.fields()})

    def whole(self, choices: list[CompletionOutput], prompts: Sequence[PromptSide], usage: Usage) -> bytes:
        """Return the body of a whole answer: an object, or a list of them for several choices."""
        self._first = usage.first_token_time
        shown = []
        for index, output in enumerate(choices):
            if self._has_no_output:
                _drop(output)
            self._num_made[index], self._has_line[index] = len(output.token_ids), "\n" in output.text
            ids = output.token_ids if self._body.return_tokens else []
            cached = prompts[index // self._n].num_cached_tokens
            answer = self._end(index, output, cached, output.text, ids) | self._probabilities(output)
            shown.append(self._chosen(answer) | self._proof(index, usage))
        return json_bytes(shown[0] if len(shown) == 1 else shown)

    def _counts(self, index: int, text: str, ids: list[int]) -> Json:
        return {
            "index": index,
            "content": text,
            "tokens": ids,
            "id_slot": -1,
            "tokens_predicted": self._num_made[index],
            "tokens_evaluated": len(self._prompts[index // self._n].token_ids),
        }

    def _end(self, index: int, output: CompletionOutput, cached: int, text: str, ids: list[int]) -> Json:
        """Return what is said of a choice at its end. cached: tokens of its prompt. text, ids: those to be shown."""
        prompt = self._prompts[index // self._n]
        word = output.stop_reason if isinstance(output.stop_reason, str) else ""
        decoded = "" if self._tokenizer is None else self._tokenizer.decode(prompt.token_ids)
        return {
            **self._counts(index, text, ids),
            "stop": True,
            "model": self._name,
            "generation_settings": {**self._settings, "stream": bool(self._body.stream)},
            "prompt": decoded if prompt.text is None else prompt.text,
            "has_new_line": self._has_line[index],
            "truncated": False,
            "stop_type": "word" if word else _STOP_TYPES.get(output.finish_reason or "", "none"),
            "stopping_word": word,
            "tokens_cached": cached,
            "timings": self._timings(index, cached),
        }

    def _timings(self, index: int, cached: int) -> Json:
        """Return the counts and the times of a choice, in milliseconds."""
        now = time.monotonic()
        first = self._first or now
        num_prompt = len(self._prompts[index // self._n].token_ids) - cached
        return {
            "cache_n": cached,
            **_rate("prompt", num_prompt, first - self._began),
            **_rate("predicted", self._num_made[index], now - first),
        }

    def _probabilities(self, output: CompletionOutput) -> Json:
        if output.logprobs is None:
            return {}
        shown = chat_logprobs(
            output.token_ids,
            output.logprobs,
            self._tokenizer,
            self._body.n_probs or 0,
            as_ids=False,
            shows_ids=True,
        )
        return {"completion_probabilities": shown["content"]}

    def _proof(self, index: int, usage: Usage) -> Json:
        """Return the field with the receipt of a choice's prompt."""
        return {"receipts": [usage.receipts[index // self._n]]} if usage.receipts else {}

    def _chosen(self, answer: Json) -> Json:
        return chosen_fields(answer, self._body.response_fields) if self._body.response_fields else answer


def _drop(output: CompletionOutput) -> None:
    """Leave out the token that the engine makes at least."""
    output.text, output.token_ids, output.finish_reason, output.stop_reason = "", [], "length", None
    output.logprobs = None if output.logprobs is None else []


def _rate(name: str, count: int, seconds: float) -> Json:
    took = max(seconds, 1e-6)  # programs divide by it
    return {
        f"{name}_n": count,
        f"{name}_ms": 1000 * took,
        f"{name}_per_token_ms": 1000 * took / max(1, count),
        f"{name}_per_second": count / took,
    }


def settings_of(params: SamplingParams, max_model_len: int, name: str) -> Json:
    """Return parameters under llama.cpp's names. name: of the model."""
    limit = -1 if params.max_tokens is None else params.max_tokens
    structure = params.structured_outputs
    return {
        **{one.name: getattr(params, one.name) for one in NUMBERS.values()},
        "n_ctx": max_model_len,
        "model": name,
        "seed": -1 if params.seed is None else params.seed,
        "repeat_penalty": params.repetition_penalty,
        "max_tokens": limit,
        "n_predict": limit,
        "n_probs": params.logprobs or 0,
        "stop": params.stop_strings,
        "ignore_eos": params.ignore_eos,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in (params.logit_bias or {}).items()],
        "grammar": structure.grammar or "" if structure is not None else "",
        **dict.fromkeys(("dynatemp_range", "dry_multiplier", "mirostat", "min_keep", "n_keep"), 0),
    }


async def apply_template(service: Service, request: Request) -> Response:
    """Return the prompt of a chat, as text."""
    body = request.decode(_chat_decoder)
    service.check_model(request, body.model)
    text = await render_text(service, request, body)
    return Response(json_bytes({"prompt": text}))


async def get_props(service: Service, request: Request) -> Response:
    """Describe the server: its sizes, its defaults and its chat template."""
    name, welcome, tokenizer = (
        service.check_model(request, None),
        service.engine.client.welcome,
        service.engine.tokenizer,
    )
    defaults = SamplingParams(**{"max_tokens": None, **service.default_sampling})
    length = service.max_model_len
    return Response(
        json_bytes(
            {
                "default_generation_settings": {
                    "n_ctx": length,
                    "is_processing": False,
                    "params": settings_of(defaults, length, name),
                },
                "total_slots": welcome.limits.max_num_seqs,
                "model_alias": name,
                "model_path": name,
                "modalities": {"vision": bool(welcome.features and welcome.features.image_size), "audio": False},
                "chat_template": "" if tokenizer is None else tokenizer.chat_template or "",
                "bos_token": "" if tokenizer is None else tokenizer.bos_token or "",
                "eos_token": "" if tokenizer is None else tokenizer.eos_token or "",
                "build_info": f"engine-core {VERSION}",
                "endpoint_slots": True,
                "endpoint_props": False,
                "endpoint_metrics": True,
                "is_sleeping": False,
            }
        )
    )


async def refuse_props(service: Service, request: Request) -> Response:
    """Refuse to change the server's properties."""
    raise HttpError(501, "the server's properties are options of its start; its owner changes them")


async def get_slots(service: Service, request: Request) -> Response:
    """Show the rows of the engine's batch as slots. What runs in them is not shown.

    fail_on_no_slot=1 in the query: 503 while none is free.
    """
    service.check_model(request, None)
    found, _ = await service.statistics.read()
    num_slots, num_running = service.engine.client.welcome.limits.max_num_seqs, found.num_running if found else 0
    if num_running >= num_slots and b"fail_on_no_slot=1" in request.query.split(b"&"):
        raise HttpError(503, "no slot is free", headers=retry_after(1000))
    slot = {"n_ctx": service.max_model_len, "speculative": False}
    return Response(json_bytes([{"id": at, "is_processing": at < num_running, **slot} for at in range(num_slots)]))
