"""Service: the state that all handlers share: the engine's session, the pump, the models' names and the bounds."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from frontend.calls.choose import choose_form
from frontend.client.client import EngineClient
from frontend.engine.signs import trouble
from frontend.http.bodies import SamplingFields
from frontend.http.callers.spans import Spans
from frontend.http.errors import HttpError, retry_after
from frontend.http.holdings import Held, cost_of, features_bytes, sum_of
from frontend.http.pages.recent_statistics import RecentStatistics
from frontend.http.pins import pins_of
from frontend.http.process.options import HttpOptions
from frontend.http.replies.answer_format import AnswerFormat
from frontend.http.replies.pump import Pump
from frontend.http.replies.receipts import Receipts, with_seeds
from frontend.http.replies.reply import Reply
from frontend.http.replies.text_frames import TokenJson
from frontend.http.request import Request, Response
from frontend.http.shared import Shared
from frontend.http.turns import Turns
from frontend.results.request_state import RequestState
from frontend.session import EngineHandle, PreparedRequest
from frontend.text.chat_template import render_chat
from frontend.text.prompt_forms import PromptInput
from frontend.text.prompts import check_text_fits
from frontend.text.tokenizer import Tokenizer
from ipc.errors import CallFailedError, EngineCoreError
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.records.black_box import BlackBoxReader, find_black_box
from ipc.wire.lora_messages import AdapterId, LoraAdapter

#: Bodies above this many bytes are rendered and tokenized on a thread: they would block the loop for milliseconds.
_LONG_BODY_BYTES = 4096
#: Bodies up to this many bytes are decoded at once: whatever they contain, that takes less than 10 ms.
_QUICK_BODY_BYTES = 64 << 10
#: Bounds of a longer body: arrays, objects and fields, which take half a microsecond each; and values in all.
MAX_FIELDS, MAX_VALUES = 65_536, 262_144
#: Most choices of one request, over all of its prompts.
MAX_CHOICES = 4096
#: Most bytes of one text, or 16 for each token of the model's context if that is more.
_MAX_TEXT_BYTES = 1 << 20
#: Most bytes of a part of a text without a space between two words, or 4 for each token of the context: it is tokenized
#: in one piece, with up to 350 bytes of memory for each byte.
_MAX_UNCUT_BYTES = 512 << 10
SUBMITTED_EACH_TURN = 16  # requests of one reply in a turn, 0.1 to 0.3 ms each
#: Code of the error for an unknown model name.
MODEL_NOT_FOUND = "model_not_found"
_T = TypeVar("_T")


class Service:
    """One HTTP server's side of one engine. Created in the event loop that it runs in.

    options: this model's. shared: what it has in common with the server's other models; None = it is the only one.
    """

    def __init__(self, engine: EngineHandle, options: HttpOptions, shared: Shared | None = None) -> None:
        self.engine = engine
        self.shared = shared or Shared(options)
        self._owns_shared = shared is None
        self.store, self.runs = self.shared.store, self.shared.runs
        self.options = options
        self.turns = self.shared.turns
        self.pump = Pump(engine.client, self.turns)
        self.statistics = RecentStatistics(engine.client)
        self.description = b""  # of the routes, as JSON; set by the App
        self.created = self.shared.created
        self.standing = Standing(engine.client, options.hang_timeout, self.shared)
        self.services: Sequence[Service] = (self,)  # of this server, as Served has it
        welcome = engine.client.welcome
        self.adapters = ServedAdapters(engine.client)
        self.names = options.served_model_names or (_short_name(welcome.model_name),)
        self._fingerprint = f"ec-{welcome.model_fingerprint[:16]}-{welcome.numerics}"
        self._defaults: dict[str, Any] = {
            name: value for name, value in welcome.default_sampling.items() if name in SamplingParams.__struct_fields__
        }
        self.form = choose_form(engine.tokenizer, options.tool_call_parser, options.reasoning_parser)
        self.special_tokens = {} if engine.tokenizer is None else engine.tokenizer.special_tokens()
        self.receipt_key = self.shared.receipt_key
        self.holdings = self.shared.holdings
        self.meter = self.shared.meter
        self.spans = Spans(options.otlp_traces_endpoint, self.names[0]) if options.otlp_traces_endpoint else None
        self.scrape: Callable[[], bytes] | None = None  # makes the page of /metrics; made at the first scrape
        self._token_json: dict[bool, TokenJson] = {}
        if engine.tokenizer is not None and engine.tokenizer.is_byte_level:
            self._token_json = {skip: TokenJson(engine.tokenizer.token_table(skip)) for skip in (True, False)}
        if engine.tokenizer is not None:
            _ = engine.tokenizer.bound  # takes about 20 ms, once
            engine.tokenizer.most_uncut = max(_MAX_UNCUT_BYTES, 4 * self.max_model_len)

    @property
    def fingerprint(self) -> str:
        """Return the field system_fingerprint: the model's, and the version of weights that have replaced its own."""
        version = self.engine.client.weights_version
        return f"{self._fingerprint}-w{version}" if version else self._fingerprint

    @property
    def max_model_len(self) -> int:
        """Return the most tokens that a prompt and its output may have together."""
        return self.engine.client.welcome.limits.max_model_len

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that the model recommends."""
        return self._defaults

    @property
    def capabilities(self) -> list[str]:
        """Return what the model can do, under Ollama's names: programs offer tools and images by these."""
        welcome = self.engine.client.welcome
        found = ["completion", "tools"] if not welcome.tasks or "generate" in welcome.tasks else []
        if "embed" in welcome.tasks:
            found.append("embedding")
        if welcome.features is not None and welcome.features.image_size:
            found.append("vision")
        if self.form.reasoning is not None or self.form.is_harmony:
            found.append("thinking")
        return found

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Errors: HttpError 400 if there is none."""
        if self.engine.tokenizer is None:
            raise HttpError(400, "this engine has no tokenizer: send token ids to /v1/completions")
        return self.engine.tokenizer

    def token_json(self, *, skip_special_tokens: bool) -> TokenJson | None:
        """Return the JSON of each token's text; None if a token's text depends on earlier tokens."""
        return self._token_json[skip_special_tokens] if self._token_json else None

    def names_for(self, request: Request) -> tuple[str, ...]:
        """Return the names of the model and its adapters that the caller's key may use."""
        key, names = request.key, (*self.names, *self.adapters.names)
        return names if key is None or not key.models else tuple(name for name in names if name in key.models)

    def check_model(self, request: Request, name: str | None) -> str:
        """Return the model's name as given, or our first one. With an adapter's name the request runs with that
        adapter.

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

    def choose_adapter(self, request: Request, task: str, model: str | None) -> None:
        """Run the request with the adapter named by a body's field task. model: that field, which has been checked.

        Errors: HttpError 400, 403, 404.
        """
        allowed = [name for name in self.names_for(request) if name not in self.names]
        served = ", ".join(allowed) or "none"
        if not task:
            raise HttpError(400, f"task is empty; it must be the name of an adapter: {served}", param="task")
        adapter = None if task in self.names else self.adapters.find(task)
        if adapter is None:
            text = f"the task {task!r:.200} is not the name of an adapter that is served here; served: {served}"
            raise HttpError(404, text, param="task", code=MODEL_NOT_FOUND)
        if task not in allowed:
            raise HttpError(403, f"the key may not use this task; it may use: {served}", param="task")
        if model and model not in self.names and self.adapters.find(model) != adapter:
            text = f"model names the adapter {model!r:.200}, and task another one: send one of them"
            raise HttpError(400, text, param="task")
        request.adapter = adapter

    async def run(self, request: Request, work: Callable[[], _T], *, is_long: bool = False) -> _T:
        """Run `work` on the request's text: here, or on a thread if the text is long or takes long for its size."""
        size = len(request.body) + request.num_stored_bytes
        if size <= _LONG_BODY_BYTES and not is_long:
            return work()
        return await self.turns.run(tenant_of(request), size, work)

    async def check_size(self, request: Request) -> None:
        """Check that a body can be decoded in a short time. Errors: HttpError 400."""
        await check_values(self.turns, request, max(MAX_VALUES, 2 * self.max_model_len))

    def check_text(self, text: str) -> None:
        """Check that a text is short enough to be tokenized. Errors: HttpError 400, PromptTooLongError."""
        most = max(_MAX_TEXT_BYTES, 16 * self.max_model_len)
        if len(text) > most:
            raise HttpError(
                400, f"a text has {len(text)} characters; at most {most} are read", code="context_length_exceeded"
            )

    def check_countable(self, text: str) -> None:
        """Check that a text whose tokens are counted or shown is short enough. Errors: as check_text()."""
        self.check_text(text)
        check_text_fits(self.tokenizer, text, self.max_model_len, self.max_model_len, "the text")

    def brings_template(self, template: str | None) -> bool:
        """Return whether a body's chat_template is the caller's program, and not the name of one of the model's."""
        return template is not None and template not in self.tokenizer.chat_templates

    def renderer(self, template: str | None) -> Callable[..., str]:
        """Return the function that renders a chat with a body's chat_template."""
        if not self.brings_template(template):
            return render_chat
        assert self.shared.templates is not None, "chat templates of callers are not allowed"
        return self.shared.templates.render

    def close(self) -> None:
        """Stop background work."""
        if self._owns_shared:
            self.shared.close()
        self.pump.close()
        if self.spans is not None:
            self.spans.close()

    async def service_for(self, request: Request) -> "Service":
        """Return the service that answers a request: this one."""
        return self

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
        if len(prompts) * params.n > MAX_CHOICES:
            text = f"{len(prompts)} prompts with n={params.n} are more than {MAX_CHOICES} choices"
            raise HttpError(400, f"{text}: send several requests", param="n")
        if key is not None and key.max_tokens is not None:
            if params.max_tokens is not None and params.max_tokens > key.max_tokens:
                raise HttpError(403, f"the key may ask for at most {key.max_tokens} max_tokens", param="max_tokens")
            params.max_tokens = params.max_tokens or key.max_tokens
        if key is not None and key.min_priority is not None and (body.priority or 0) < key.min_priority:
            raise HttpError(403, f"the key's priorities begin at {key.min_priority}", param="priority")
        num_more = len(prompts) * _num_answers(params) * (params.max_tokens or 1)
        self.check_prompts(request, prompts, num_more, is_cut=params.truncate_prompt_tokens is not None)
        if body.cache_salt:
            prompts = [_salted(prompt, body.cache_salt) for prompt in prompts]
        prepared = self.engine.prepare(
            prompts,
            params,
            [body.priority or 0] * len(prompts),
            request.deadline_s(),
            tenant=tenant_of(request),
            add_special_tokens=add_special_tokens,
            is_shared=False,
            lora=request.adapter,
            pins=pins_of(request, body),
        )
        request.wants_receipts = bool(body.receipt)
        return with_seeds(prepared) if request.wants_receipts else prepared

    def check_prompts(
        self, request: Request, prompts: Sequence[object], num_more: int = 0, *, is_cut: bool = False
    ) -> None:
        """Before any text is read, check the texts' sizes, and the key's tokens against the fewest that the request can
        take.

        num_more: of the answers. is_cut: prompts are truncated. A chat that is not rendered yet counts as a token.
        Errors: HttpError.
        """
        fewest = 0
        for prompt in prompts:
            text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
            if isinstance(text, str):
                self.check_text(text)
                fewest += 1 if self.engine.tokenizer is None else self.engine.tokenizer.bound.fewest_tokens(text)
            elif isinstance(prompt, Sequence):
                fewest += len(prompt)
            elif isinstance(prompt, Mapping):
                fewest += len(prompt.get("prompt_embeds", ()))
            else:
                fewest += 1
        if request.lease is not None:
            request.lease.check_tokens(num_more + (len(prompts) if is_cut else fewest))

    def check_held(self, request: Request) -> None:
        """Check that there is memory for images, before they are fetched and read. Errors: HttpError 503."""
        self.holdings.check(1, own=0 if request.held is None else request.held.num_bytes)

    def hold(self, request: Request, prepared: Sequence[PreparedRequest]) -> None:
        """Take memory for the images of prompts as squares, and for embeddings, which the client keeps until the answer
        ends.

        It replaces what the request holds. Called again for the same prompts, it does nothing. Errors: HttpError 503.
        """
        before = request.held
        num_bytes, own = features_bytes(one.prompt for one in prepared), 0 if before is None else before.num_bytes
        if num_bytes == own:
            return
        request.held = Held(num_bytes, self.holdings.take(num_bytes, own=own))
        if before is not None:
            before.give_back()

    async def submit(self, request: Request, prepared: Sequence[PreparedRequest], answer: AnswerFormat) -> Reply:
        """Submit the requests of one reply, some in each turn of the event loop, and feed the reply.

        Errors: HttpError; those of EngineClient.submit().
        """
        self.standing.refuse_requests()  # the drain may have begun while a thread prepared them
        receipts = Receipts(self.engine.client, self.receipt_key, prepared) if request.wants_receipts else None
        first = prepared[0].params
        is_streamed, lease = first.output_kind == RequestOutputKind.DELTA, request.lease
        give_back = self._take(request, prepared, is_streamed=is_streamed)

        def settle(num_tokens: int) -> None:
            give_back()
            if lease is not None:
                lease.end(num_tokens)

        num_choices = sum(one.params.n for one in prepared)
        length = self.max_model_len
        reply = Reply(
            request,
            answer,
            is_streamed=is_streamed,
            max_model_len=length,
            num_choices=num_choices,
            receipts=receipts,
            on_end=settle,
        )
        try:
            if lease is not None:
                lease.reserve(sum(map(self._most_tokens, prepared)))
            for at in range(0, len(prepared), SUBMITTED_EACH_TURN):
                if at:
                    await asyncio.sleep(0)
                if request.exchange.has_left or reply.is_ended:
                    break
                self._submit_some(prepared[at : at + SUBMITTED_EACH_TURN], reply)
        except BaseException:
            reply.end("refused")
            raise
        return reply

    def _submit_some(self, prepared: Sequence[PreparedRequest], reply: Reply) -> None:
        states: list[tuple[RequestState, SamplingParams]] = []
        try:
            for one in prepared:
                states.append((self.engine.submit(one), one.params))  # noqa: PERF401 - for the except
        except BaseException:
            self.engine.client.discard([state.number for state, _ in states])
            raise
        self.pump.add(reply, states)

    def _take(self, request: Request, prepared: Sequence[PreparedRequest], *, is_streamed: bool) -> Callable[[], None]:
        """Take memory for an answer; return what gives that back, and what the request held. Errors: HttpError."""
        vocab_size = self.engine.client.welcome.vocab_size
        sizes = ((len(one.prompt.token_ids), one.params) for one in prepared)
        num_bytes = sum_of(
            cost_of(size, params, self.max_model_len - size, vocab_size, is_streamed=is_streamed)
            for size, params in sizes
        )
        self.hold(request, prepared)
        held = request.held
        give_back = self.holdings.take(num_bytes, own=0 if held is None else held.num_bytes)
        if held is None:
            return give_back
        request.held = None  # from here on the answer's

        def give_all_back() -> None:
            give_back()
            held.give_back()

        return give_all_back

    def note(self, request: Request, answer: Response | Reply) -> None:
        """Count a request that has ended, and log it if enabled."""
        now = time.monotonic()
        self.shared.note(request, answer, now)
        if self.spans is not None:
            self.spans.write(request, answer.status, answer if isinstance(answer, Reply) else None, now)

    def _most_tokens(self, one: PreparedRequest) -> int:
        """Return the most tokens that a request can take, including its prompt's and those of all beams."""
        num_prompt, limit = len(one.prompt.token_ids), one.params.max_tokens
        room = self.max_model_len - num_prompt
        return num_prompt + _num_answers(one.params) * (room if limit is None else min(limit, room))


def _num_answers(params: SamplingParams) -> int:
    """Return how many answers the engine computes for a prompt: choices, or the beams of a search."""
    return max(params.n, params.best_of or 0) if params.use_beam_search else params.n


def tenant_of(request: Request) -> str:
    """Return the name of the caller's key."""
    return "" if request.key is None else request.key.name


def _short_name(name: str) -> str:
    """Return the last part of a model's name if it is a path, so that callers do not see folders."""
    return Path(name).name.removesuffix(".gguf") if Path(name).is_absolute() else name


def _salted(prompt: PromptInput, salt: str) -> PromptInput:
    if isinstance(prompt, Mapping):
        return {**prompt, "cache_salt": salt}  # type: ignore[return-value]
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {key: prompt, "cache_salt": salt}  # type: ignore[return-value]


# How many values a body of JSON has, before it is decoded in one piece that holds Python's lock.


#: The start of a JSON value or field; a string is skipped as a whole.
_PARTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{:,]', re.DOTALL)
_LOOKED_AT = 1 << 18  # bytes, between two checks of the counts
_COMMA, _QUOTE = b',"'


async def check_values(turns: Turns, request: Request, most_values: int = MAX_VALUES) -> None:
    """Check that a body can be decoded in a short time. Errors: HttpError 400."""
    body = request.body
    if len(body) <= _QUICK_BODY_BYTES or is_small(body, MAX_FIELDS, most_values):
        return
    if not await turns.run(tenant_of(request), len(body), lambda: has_few_values(body, MAX_FIELDS, most_values)):
        text = f"the body has more than {MAX_FIELDS} arrays, objects and fields, or {most_values} values"
        raise HttpError(400, f"{text}: send several requests")


def is_small(body: bytes, most_fields: int, most_values: int) -> bool:
    """Return whether a body has at most this many values; False if only has_few_values() can tell.

    It counts starts of values, also inside strings.
    """
    num_fields = num_values = 0
    for at in range(0, len(body), _LOOKED_AT):
        end = at + _LOOKED_AT
        num_fields += sum(body.count(sign, at, end) for sign in (b"[", b"{", b":"))
        num_values += body.count(b",", at, end)
        if num_fields > most_fields or num_values > most_values:
            return False
    return True


def has_few_values(body: bytes, most_fields: int, most_values: int) -> bool:
    """Return whether a body has at most this many arrays, objects and fields, and this many values in all.

    To be run on a thread; it works in short steps.
    """
    num_fields = num_values = 0
    for found in _PARTS.finditer(body):
        sign = body[found.start()]
        if sign == _COMMA:
            num_values += 1
        elif sign != _QUOTE:
            num_fields += 1
        if num_fields > most_fields or num_values > most_values:
            return False
    return True


# ServedAdapters: the engine's adapters as separate models, by name.


#: How long a list of the engine's adapters is used: loaded or unloaded names take effect here after that time.
_FRESH_S = 1.0


class ServedAdapters:
    """The adapters that the engine has loaded. For the event loop's thread.

    An engine without adapters is asked only once.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._by_name: dict[str, LoraAdapter] = {}
        self._may_have = True  # until the engine has said that it has none
        self._looked_at = float("-inf")  # monotonic seconds
        self._looking: asyncio.Task[None] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the adapters' names from the last answer."""
        return tuple(self._by_name)

    def find(self, name: str) -> AdapterId | None:
        """Return the adapter of this name from the last answer."""
        listed = self._by_name.get(name)
        return None if listed is None else AdapterId(listed.digest)

    async def catch_up(self) -> None:
        """Ask for the engine's adapters, unless the last answer is new enough. Several callers share one call."""
        if not self._may_have or time.monotonic() - self._looked_at < _FRESH_S:
            return
        await self.look()

    async def look(self) -> None:
        """Ask for the engine's adapters now."""
        if not self._may_have:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        self._looked_at = time.monotonic()
        try:
            listed = await asyncio.to_thread(self._client.lora_adapters)
        except CallFailedError:  # the engine is being restarted: keep the known list
            return
        self._may_have = listed.is_enabled
        self._by_name = {one.name: one for one in listed.adapters}


# Standing: whether this server accepts new requests, and why not. Probes and requests get the same answer from it.
#
# | state | /live | /health, /ready, /ping | a new request |
# |---|---|---|---|
# | serving, or the engine is being restarted | 200 | 200 | is answered |
# | the engine hangs, and will be restarted | 200 | 503 | waits |
# | this server has received SIGTERM | 200 | 503 | 503 |
# | the engine drains, or its owner has paused it | 200 | 503 | 503 |
# | there is no engine | 200 | 503 | 503 |


_TIMEOUT_S = 0.5


class Standing:
    """The standing of one server with one engine. hang_timeout: see HttpOptions."""

    def __init__(self, client: EngineClient, hang_timeout: float, shared: Shared) -> None:
        self._client, self._hang_timeout, self._shared = client, hang_timeout, shared
        self.cached_block = 0  # tokens of a block of the engine's prefix cache; 0 = it has none, or has not said so yet
        self._not_taking = ""  # why the engine accepts no requests, from its last answer
        self._asking: asyncio.Future[None] | None = None
        self._box: BlackBoxReader | None = None  # of the engine, if it is on this machine
        self._box_epoch = -1  # when it was last looked for

    def refuse_requests(self) -> None:
        """Do nothing while new requests are accepted. Errors: HttpError 503."""
        if self._shared.is_draining:
            raise HttpError(503, "the server is shutting down", headers=retry_after(1000))
        if self._client.error is not None:
            raise HttpError(503, "the engine is not running", headers=retry_after(1000))
        if self._not_taking:
            raise HttpError(503, self._not_taking, headers=retry_after(1000))

    def refuse_probe(self) -> None:
        """Do nothing while new requests are accepted and answered soon. It never waits. Errors: HttpError 503."""
        self.refuse_requests()
        if text := self._describe_hang():
            raise HttpError(503, f"the engine hangs: {text}")

    def ask(self) -> None:
        """Ask the engine, without waiting, whether it accepts requests; called regularly."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(asyncio.to_thread(self._ask))

    def _ask(self) -> None:
        try:
            said = self._client.model_information(_TIMEOUT_S)
            self._not_taking = said.not_taking
            self.cached_block = said.block_size if said.enable_prefix_caching else 0
        except EngineCoreError:  # it hangs or is being restarted: then requests are accepted, and wait
            self._not_taking = ""

    def _describe_hang(self) -> str:
        """Return why the engine counts as hung, "" if it does not; by its black box, so this never waits."""
        welcome = self._client.welcome
        if self._box_epoch != welcome.epoch:
            self._box_epoch = welcome.epoch
            self._box = find_black_box(welcome.pid)
        return "" if self._box is None else trouble(self._box.read(), time.monotonic_ns(), self._hang_timeout)
