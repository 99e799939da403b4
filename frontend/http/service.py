"""Service: what all handlers share: the engine's session, the pump, the models' names and the bounds."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from frontend.calls.choose import choose_form
from frontend.http.adapters import ServedAdapters
from frontend.http.bodies import SamplingFields
from frontend.http.callers.access_log import AccessLog
from frontend.http.callers.keys import KeyRing
from frontend.http.callers.meter import HttpMeter
from frontend.http.callers.quotas import Quotas
from frontend.http.callers.spans import Spans
from frontend.http.errors import HttpError
from frontend.http.pages.recent_statistics import RecentStatistics
from frontend.http.process.options import HttpOptions
from frontend.http.replies.answer_format import AnswerFormat
from frontend.http.replies.pump import Pump
from frontend.http.replies.reply import Reply
from frontend.http.replies.text_frames import TokenJson
from frontend.http.request import Request, Response
from frontend.http.standing import Standing
from frontend.results.request_state import RequestState
from frontend.session import EngineHandle, PreparedRequest
from frontend.text.prompt_forms import PromptInput
from frontend.text.tokenizer import Tokenizer
from ipc.params.sampling_params import SamplingParams

#: Bodies above this many bytes are rendered and tokenized on a thread: they would block the loop for milliseconds.
_LONG_BODY_BYTES = 4096
#: Code of the error for a name that is no model here.
MODEL_NOT_FOUND = "model_not_found"
_T = TypeVar("_T")


class Service:
    """One HTTP server's side of one engine. Made in the event loop that it runs in."""

    def __init__(self, engine: EngineHandle, options: HttpOptions) -> None:
        self.engine = engine
        self.options = options
        self.pump = Pump(engine.client)
        self.statistics = RecentStatistics(engine.client)
        self.description = b""  # of the routes, as JSON; the App knows them
        self.created = int(time.time())
        self.standing = Standing(engine.client, options.hang_timeout)
        welcome = engine.client.welcome
        self.adapters = ServedAdapters(engine.client)
        self.names = options.served_model_names or (_short_name(welcome.model_name),)
        self.fingerprint = f"ec-{welcome.model_fingerprint[:16]}-{welcome.numerics}"
        self._defaults: dict[str, Any] = {
            name: value for name, value in welcome.default_sampling.items() if name in SamplingParams.__struct_fields__
        }
        self.form = choose_form(engine.tokenizer, options.tool_call_parser, options.reasoning_parser)
        self.special_tokens = {} if engine.tokenizer is None else engine.tokenizer.special_tokens()
        self.keys = KeyRing(options.key_digests, options.api_key_file)
        self._quotas = Quotas()
        self.meter = HttpMeter()
        self._access_log = AccessLog(options.log_format) if options.access_log else None
        self.spans = Spans(options.otlp_traces_endpoint, self.names[0]) if options.otlp_traces_endpoint else None
        self.scrape: Callable[[], bytes] | None = None  # makes the page of /metrics; made at the first scrape
        self._token_json: dict[bool, TokenJson] = {}
        if engine.tokenizer is not None and engine.tokenizer.is_byte_level:
            self._token_json = {skip: TokenJson(engine.tokenizer.token_table(skip)) for skip in (True, False)}
        self._threads = asyncio.Semaphore(max(1, len(os.sched_getaffinity(0)) - 1))

    def close(self) -> None:
        """End what runs by itself."""
        self.pump.close()
        if self.spans is not None:
            self.spans.close()

    @property
    def max_model_len(self) -> int:
        """Return the tokens that a prompt and its output may have together."""
        return self.engine.client.welcome.limits.max_model_len

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that the model recommends."""
        return self._defaults

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Errors: HttpError 400 where there is none."""
        if self.engine.tokenizer is None:
            raise HttpError(400, "this engine has no tokenizer: send token ids to /v1/completions")
        return self.engine.tokenizer

    def token_json(self, *, skip_special_tokens: bool) -> TokenJson | None:
        """Return the JSON of each token's text; None where a token's text depends on those before it."""
        return self._token_json[skip_special_tokens] if self._token_json else None

    def names_for(self, request: Request) -> tuple[str, ...]:
        """Return the model's and its adapters' names that the caller's key may use."""
        key, names = request.key, (*self.names, *self.adapters.names)
        return names if key is None or not key.models else tuple(name for name in names if name in key.models)

    def check_model(self, request: Request, name: str | None) -> str:
        """Return the model's name as given, or the first of ours. With an adapter's the request runs with that.

        Errors: HttpError 403, 404.
        """
        allowed = self.names_for(request)
        adapter = self.adapters.find(name) if name and name not in self.names else None
        is_known = name in self.names or adapter is not None
        if not allowed or (is_known and name not in allowed):
            raise HttpError(403, f"the key may not use this model; it may use: {', '.join(allowed)}", param="model")
        if not name:
            name = allowed[0]
            adapter = self.adapters.find(name) if name not in self.names else None
        elif not is_known:
            known = ", ".join(allowed)
            text = f"the model {name!r:.200} is not served here; served: {known}"
            raise HttpError(404, text, param="model", code=MODEL_NOT_FOUND)
        request.adapter = adapter
        return name

    async def run(self, request: Request, work: Callable[[], _T], *, is_long: bool = False) -> _T:
        """Run `work` on the request's text: here, or on a thread if there is much of it, or it is long for its size."""
        if len(request.body) <= _LONG_BODY_BYTES and not is_long:
            return work()
        async with self._threads:
            return await asyncio.to_thread(work)

    def prepare(
        self,
        request: Request,
        body: SamplingFields,
        prompts: Sequence[PromptInput],
        params: SamplingParams,
        *,
        add_special_tokens: bool,
    ) -> list[PreparedRequest]:
        """Check and tokenize the prompts of a request. Errors: HttpError, InvalidRequestError."""
        key = request.key
        if key is not None and key.max_tokens is not None:
            if params.max_tokens is not None and params.max_tokens > key.max_tokens:
                raise HttpError(403, f"the key may ask for {key.max_tokens} max_tokens", param="max_tokens")
            params.max_tokens = params.max_tokens or key.max_tokens
        if key is not None and key.min_priority is not None and (body.priority or 0) < key.min_priority:
            raise HttpError(403, f"the key's priorities begin at {key.min_priority}", param="priority")
        if body.cache_salt:
            prompts = [_salted(prompt, body.cache_salt) for prompt in prompts]
        return self.engine.prepare(
            prompts,
            params,
            [body.priority or 0] * len(prompts),
            request.deadline_s(),
            tenant="" if key is None else key.name,
            add_special_tokens=add_special_tokens,
            is_shared=False,
            lora=request.adapter,
        )

    def submit(self, request: Request, prepared: Sequence[PreparedRequest], answer: AnswerFormat) -> Reply:
        """Submit the requests of one reply and feed it. Errors: those of EngineClient.submit()."""
        self.standing.refuse_requests()  # the drain may have begun while a thread prepared them
        is_streamed = prepared[0].params.output_kind == prepared[0].params.output_kind.DELTA
        settle = self._quotas.take(request.key, sum(map(self._most_tokens, prepared)))
        reply = Reply(request, answer, is_streamed=is_streamed, max_model_len=self.max_model_len, on_end=settle)
        states: list[tuple[RequestState, SamplingParams]] = []
        try:
            for one in prepared:
                states.append((self.engine.submit(one), one.params))  # noqa: PERF401 - for the except
        except BaseException:
            self.engine.client.discard([state.number for state, _ in states])
            reply.end("refused")
            raise
        self.pump.add(reply, states)
        return reply

    def take_quota(self, request: Request, num_tokens: int) -> Callable[[int], None] | None:
        """Take a request of so many tokens from its key's quotas; see Quotas.take()."""
        return self._quotas.take(request.key, num_tokens)

    def note(self, request: Request, answer: Response | Reply) -> None:
        """Count a request that has ended, and log it where that is asked for."""
        now, reply = time.monotonic(), answer if isinstance(answer, Reply) else None
        self.meter.count(request.route, request.method, answer.status, now - request.received_at)
        if self._access_log is not None:
            self._access_log.write(request, answer.status, reply)
        if self.spans is not None:
            self.spans.write(request, answer.status, reply, now)

    def _most_tokens(self, one: PreparedRequest) -> int:
        """Return the most tokens that a request can take, its prompt's included."""
        num_prompt, limit = len(one.prompt.token_ids), one.params.max_tokens
        room = self.max_model_len - num_prompt
        return num_prompt + one.params.n * (room if limit is None else min(limit, room))


def _short_name(name: str) -> str:
    """Return the last part of a model's name where it is a path: callers learn no folders."""
    return Path(name).name.removesuffix(".gguf") if Path(name).is_absolute() else name


def _salted(prompt: PromptInput, salt: str) -> PromptInput:
    if isinstance(prompt, Mapping):
        return {**prompt, "cache_salt": salt}  # type: ignore[return-value]
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {key: prompt, "cache_salt": salt}  # type: ignore[return-value]
