"""EngineHandle: the engine (started or connected to), the client and the tokenizer that LLM and AsyncLLM share."""

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from frontend.call_arguments import read_deadline, read_path, read_priorities, read_template_kwargs, wrong_number
from frontend.client.alternatives import Alternatives
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.client.transport_interface import Transport
from frontend.engine.process import EngineProcess
from frontend.engine.start_display import StartDisplay
from frontend.engine.supervised_engine import SupervisedEngine
from frontend.fleet.placement import POLICIES
from frontend.fleet.transport import FleetTransport
from frontend.images.image_prompts import ImagePrompts, image_prompts
from frontend.lora import LoadedAdapters, LoRAInput
from frontend.receipts import Answer, receipt_of
from frontend.results.completion_state import needs_every_token
from frontend.results.outputs import Submitted
from frontend.results.request_state import RequestState
from frontend.results.state import Output, State
from frontend.text.bad_words import bad_words_token_ids
from frontend.text.chat_prompts import render_prompts
from frontend.text.chat_template import render_chat
from frontend.text.known_tokenizers import AHEAD, KnownTokenizers
from frontend.text.prompt_forms import PromptInput
from frontend.text.prompts import Prompt, read_prompts
from frontend.text.tokenizer import Tokenizer
from ipc.errors import ConfigError, InvalidRequestError, ModelFileError, UnsupportedModelError
from ipc.files.model_files import read_chat_template, read_tokenizer_files, tokenizer_hash
from ipc.keys.signing import SigningKey
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options
from ipc.options.tokenizer_files import client_files_of
from ipc.params.pooling_params import GENERATE
from ipc.params.sampling_params import RequestOutputKind, SamplingParams, check_num_logprobs
from ipc.records.receipt import Receipt
from ipc.wire.lora_messages import AdapterId
from ipc.wire.pin_messages import Pin, check_pins

Message: TypeAlias = dict[str, Any]

_RESUME_S = 60.0  # time for which our engine may be away; the client asks the supervisor and waits as long as that says
_MAX_TIMEOUT_S = 1e6  # poll() counts milliseconds in 31 bits


class PreparedRequest(NamedTuple):
    """A checked request, ready to be submitted."""

    prompt: Prompt
    params: SamplingParams
    priority: int
    deadline: float | None = None  # monotonic seconds; the request fails unless it has finished by then
    tenant: str = ""
    adapter: AdapterId | None = None
    pins: tuple[Pin, ...] = ()


class EngineHandle:
    """An engine in use; close() ends the session, and stops the engine if this handle started it.

    model: a model folder, .gguf file or Hugging Face name; None = the demo model (with executor="fake": none). connect:
    address of a running engine, instead of a model, or several. route: how requests are spread over several (prefix,
    least_loaded or round_robin); None = one of them serves, and the next one if that is lost. seed: seed of requests
    without one of their own; None = 0. tokenizer: path of the tokenizer files, instead of the model's; skip_tokenizer:
    use token ids only. start_timeout, connect_timeout: seconds. restart: whether an engine that dies is restarted and
    its requests continue. client_name: this client's name in the engine. options: those of EngineConfig; with connect
    only chat_template, which then applies to this client. known: tokenizers of earlier sessions with engines. Errors:
    ConfigError, ModelFileError, EngineStartError, EngineDeadError, HandshakeError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None,
        *,
        connect: str | Sequence[str] | None,
        route: str | None = None,
        seed: int | None,
        tokenizer: str | os.PathLike[str] | None,
        skip_tokenizer: bool,
        start_timeout: float,
        connect_timeout: float,
        restart: bool,
        client_name: str,
        options: Mapping[str, Any],
        known: KnownTokenizers | None = None,
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, (int, type(None))):
            raise ConfigError(f"seed must be an integer, got {seed!r}")
        self._seed = seed or 0
        if not isinstance(client_name, str):
            raise ConfigError(f"client_name must be a str, got {client_name!r:.80}")
        self._client_name = client_name
        self._process: EngineProcess | None = None
        self._supervised: SupervisedEngine | None = None
        self._owner = os.getpid()
        _check_timeout("start_timeout", start_timeout)
        _check_timeout("connect_timeout", connect_timeout)
        self._text_source = read_path("tokenizer", tokenizer)
        self._skip_tokenizer = skip_tokenizer
        self.tokenizer: Tokenizer | None = None
        self._files: Mapping[str, bytes] = {}
        self._known = KnownTokenizers(0) if known is None else known
        if connect is None:
            config = config_from_options(model=read_path("model", model), **options)
            self._start(config, start_timeout, connect_timeout, restart)
        else:
            own = dict(options)
            template = read_chat_template(read_path("chat_template", own.pop("chat_template", None)))
            if model is not None or own:
                given = ["model"] if model is not None else []
                raise ConfigError(
                    f"connect={connect!r} uses a running engine, whose options are fixed; leave out "
                    f"{', '.join([*given, *own])}"
                )
            self._connect(self._transport_to(connect, route), connect_timeout, template)
        if connect is None and route is not None:
            raise ConfigError(f"route={route!r} is for running engines: give their addresses with connect=[...]")
        self.adapters = LoadedAdapters(self.client)
        self.images: ImagePrompts | None = None
        if self.tokenizer is not None:
            limits, ids = self.client.welcome.features, self.tokenizer.hf.token_to_id
            try:
                self.images = image_prompts(self._files, limits, ids)
            except (ModelFileError, UnsupportedModelError):
                if GENERATE in self.client.welcome.tasks:
                    raise  # vectors of texts need no image processor, and folders for them may lack it
        self._salt = b"" if connect is None or seed is not None else self.client.welcome.session_token

    def prepare(
        self,
        prompts: Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None = None,
        deadline: float | None = None,
        *,
        tenant: str = "",
        add_special_tokens: bool = True,
        is_shared: bool = True,
        lora: LoRAInput = None,
        pins: Sequence[Pin] = (),
    ) -> list[PreparedRequest]:
        """Check and tokenize all prompts, before any is submitted; return one PreparedRequest each.

        deadline: seconds from now. tenant: see LLM.generate(). is_shared: whether a caller may change the parameters
        while the requests run, so that they are copied. lora: the prompts' adapters, which the engine loads now.
        pins: of each prompt; if there are several prompts, without names.
        Errors: InvalidRequestError.
        """
        if not isinstance(tenant, str):
            raise InvalidRequestError(f"tenant must be a str, got {type(tenant).__name__}")
        end, pinned = read_deadline(deadline), tuple(pins)
        if len(prompts) > 1 and any(pin.name for pin in pinned):
            raise InvalidRequestError("a pin with a name is of one prompt: give several prompts pins without names")
        all_params = self._read_params(params, len(prompts), is_shared=is_shared)
        vocab_size, limits = self.client.welcome.vocab_size, self.client.welcome.limits
        for one in all_params:
            check_num_logprobs(one, vocab_size=vocab_size, max_logprobs=limits.max_logprobs)
        read = read_prompts(
            prompts,
            self.tokenizer,
            vocab_size=vocab_size,
            max_model_len=limits.max_model_len,
            add_special_tokens=add_special_tokens,
            truncation=[one.truncate_prompt_tokens for one in all_params],
            features=self.client.welcome.features,
            images=self.images,
        )
        for prompt in read if pinned else ():
            check_pins(pinned, len(prompt.token_ids))
        priorities = read_priorities(priority, len(read))
        adapters = self.adapters.of_prompts(lora, len(read))
        return [
            PreparedRequest(prompt, one, urgency, end, tenant, adapter, pinned)
            for prompt, one, urgency, adapter in zip(read, all_params, priorities, adapters, strict=True)
        ]

    def prepare_each(
        self,
        prompts: Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None = None,
        deadline: float | None = None,
        *,
        tenant: str = "",
        lora: LoRAInput = None,
        pins: Sequence[Pin] = (),
    ) -> list[PreparedRequest | InvalidRequestError]:
        """Return prepare()'s result, with an error instead of each prompt that cannot be served.

        Errors: InvalidRequestError for arguments that are wrong for all prompts.
        """
        try:
            return [*self.prepare(prompts, params, priority, deadline, tenant=tenant, lora=lora, pins=pins)]
        except InvalidRequestError:
            lists = [one for one in (params, priority, lora) if isinstance(one, Sequence)]
            if any(len(one) != len(prompts) for one in lists):
                raise
            self.prepare([], [] if isinstance(params, Sequence) else params, None, deadline, tenant=tenant)
        prepared: list[PreparedRequest | InvalidRequestError] = []
        for index, prompt in enumerate(prompts):
            own = [one[index] if isinstance(one, Sequence) else one for one in (params, priority, lora)]
            try:
                options: Any = {"tenant": tenant, "lora": own[2], "pins": pins}
                prepared += self.prepare([prompt], own[0], own[1], deadline, **options)  # type: ignore[arg-type]
            except InvalidRequestError as error:
                prepared.append(error)
        return prepared

    def render_chats(
        self,
        conversations: Sequence[list[Message]],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any] | None,
        takes_files: bool = True,
        render: Callable[..., str] = render_chat,
    ) -> list[PromptInput]:
        """Return the prompt of each conversation, rendered by a chat template: a str, or an ImagePrompt.

        chat_template: None = the model's, a name = the model's template of this name, otherwise a template's text.
        takes_files: whether images may be files of this machine. render: used instead of render_chat(). Errors:
        InvalidRequestError.
        """
        return render_prompts(
            self.tokenizer,
            conversations,
            template=chat_template,
            image_mark=None if self.images is None else self.images.mark,
            takes_files=takes_files,
            render=render,
            arguments={
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "tools": tools,
                **read_template_kwargs(kwargs),
            },
        )

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the engine recommends, without those unknown to this version."""
        known = SamplingParams.__struct_fields__
        recommended: dict[str, Any] = self.client.welcome.default_sampling
        return SamplingParams(**{name: value for name, value in recommended.items() if name in known})

    def submit(self, prepared: PreparedRequest, request_id: str | None = None, seed: int | None = None) -> RequestState:
        """Submit a request; request_id None = its number, seed None = derive_seed() of its number, if its parameters
        have none. Errors: those of EngineClient.submit.
        """
        prompt, params, priority, deadline, tenant, adapter, pins = prepared
        left_s = None if deadline is None else deadline - time.monotonic()
        own = seed if params.seed is None else params.seed
        number = self.client.submit(
            prompt.token_ids,
            params,
            seed=self.derive_seed if own is None else own,
            priority=priority,
            deadline_ms=0 if left_s is None else max(1, math.ceil(left_s * 1000)),
            cache_salt=prompt.cache_salt,
            tenant=tenant,
            streaming=needs_every_token(params),
            adapter=adapter,
            features=prompt.features,
            pins=pins,
        )
        name = str(number) if request_id is None else request_id
        state = RequestState(name, number, prompt, params, tokenizer=self.tokenizer)
        state.submitted = Submitted(number, params, own, adapter, prompt.features)
        return state

    def receipt(self, output: Answer, key: str | os.PathLike[str] | None) -> Receipt:
        """Return the receipt of a finished output; see LLM.receipt()."""
        signing = None if key is None else SigningKey(os.fspath(key))
        return receipt_of(self.client, output, signing, self.derive_seed)

    def advance(self, state: State[Output]) -> Output | None:
        """Update a request with its news; return its output, or None if there is nothing to show.

        Errors: the error with which the engine failed the request.
        """
        progress = [self.client.read(state.number, start, choice) for choice, start in state.wanted]
        for one in progress:
            if one.error is not None:
                raise one.error
        output = state.update(*progress)
        stopped = state.take_stopped()
        if stopped and not state.finished:  # a finished request is stopped when it is discarded
            self.client.abort([state.number] * len(stopped), stopped)
        return output

    def need_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Errors: InvalidRequestError if there is none."""
        if self.tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer: it takes and returns token ids only")
        return self.tokenizer

    def describe(self) -> str:
        """Return the model's name, the numerics level and the engine's state, as arguments of a repr()."""
        welcome, error = self.client.welcome, self.client.error
        state = "running" if error is None else f"{error}"
        return f"model={welcome.model_name!r}, numerics={welcome.numerics!r}, engine={state!r}"

    def close(self, timeout: float = 5.0) -> None:
        """End the session, and stop the engine if this handle started it, within `timeout` seconds."""
        self.client.close()
        if self._process is not None and self._owner == os.getpid():
            _end(self._process, self._supervised, timeout)
            self._process = self._supervised = None

    def _start(self, config: EngineConfig, start_timeout: float, connect_timeout: float, restart: bool) -> None:
        display, resume_s = StartDisplay(), _RESUME_S if restart else 0.0
        process = EngineProcess(config, start_timeout=start_timeout, resume_s=resume_s, on_phase=display)
        supervised = SupervisedEngine(process) if restart else None
        started = supervised or process
        try:
            started.start()
            files = self._read_own_files(process.config)  # while the engine starts
            with display:
                started.wait_ready()
            if supervised is None:
                transport = ZmqTransport(process.address, pidfd=process.pidfd, describe_exit=process.describe_exit)
            else:
                address, describe = process.address, supervised.describe_end
                locate = supervised.locate
                transport = ZmqTransport(address, locate=locate, describe_exit=describe, grace=_MAX_TIMEOUT_S)
            self.client = EngineClient(
                transport,
                name=self._client_name,
                owner_token=process.owner_token,
                hello_timeout=connect_timeout,
            )
        except BaseException:
            _end(process, supervised, 0.0)
            raise
        self._supervised = supervised
        self._process = process
        if (numerics := self.client.welcome.numerics) < config.numerics:
            logging.getLogger("engine_core").warning(
                "the engine runs at numerics level %s, not %s: a request's tokens may depend on its neighbours",
                numerics,
                config.numerics,
            )
        if files and self._text_source is None:
            self._check_hash(files)

    def _transport_to(self, connect: str | Sequence[str], route: str | None) -> Transport:
        """Return the transport to one running engine, or to several. Errors: ConfigError, AddressError."""
        addresses = [connect] if isinstance(connect, str) else list(connect)
        if not addresses or not all(isinstance(one, str) for one in addresses) or len({*addresses}) < len(addresses):
            raise ConfigError(f"connect must be an address or a list of different addresses, got {connect!r:.200}")
        if route is not None and route not in POLICIES:
            raise ConfigError(f"route must be one of {', '.join(POLICIES)}, or None; got {route!r:.80}")
        if route is not None:
            return FleetTransport(addresses, route=route, seed=self._seed, name=self._client_name)
        if len(addresses) == 1:
            return ZmqTransport(addresses[0])
        alternatives = Alternatives(addresses)
        return ZmqTransport(alternatives.first, locate=alternatives, grace=_RESUME_S)

    def _connect(self, transport: Transport, connect_timeout: float, template: dict[str, bytes]) -> None:
        self.client = EngineClient(transport, name=self._client_name, hello_timeout=connect_timeout)
        try:
            if self._skip_tokenizer:
                return
            if self._text_source is not None:
                self._load(read_tokenizer_files(Path(self._text_source)) | template)
            else:
                self._load_theirs(template)
        except BaseException:
            self.client.close()
            raise

    def _read_own_files(self, config: EngineConfig) -> dict[str, bytes]:
        if self._skip_tokenizer:
            return {}
        files = client_files_of(config, self._text_source)
        self._load(files)
        return files

    def _load(self, files: dict[str, bytes]) -> None:
        if files or self._text_source is not None:
            self.tokenizer, self._files = Tokenizer.from_files(files), files

    def _load_theirs(self, template: dict[str, bytes]) -> None:
        """Load the engine's files, unless their tokenizer is known. template: the caller's own, or nothing."""
        files_hash = self.client.welcome.tokenizer_hash
        found = None if template else AHEAD.take(files_hash) or self._known.get(files_hash)
        if found is not None:
            self.tokenizer, self._files = found
            return
        self._load(self.client.tokenizer_files().files | template)
        if self.tokenizer is not None and not template:
            self._known.put(files_hash, self.tokenizer, self._files)

    def _check_hash(self, files: dict[str, bytes]) -> None:
        theirs, ours = self.client.welcome.tokenizer_hash, tokenizer_hash(files)
        if theirs and theirs != ours:
            self.close()
            raise ModelFileError(f"the model's tokenizer files changed while the engine started: {theirs} and {ours}")

    def derive_seed(self, number: int) -> int:
        """Return the uint64 seed of a request without one of its own.

        It depends on LLM(seed=) and the request's number: the same program with the same seed makes the same draws.
        With connect= and no seed= it depends on the session too, so that two clients of one engine do not draw the same
        numbers.
        """
        text = b"%d:%d:" % (self._seed, number)
        return int.from_bytes(hashlib.blake2b(text + self._salt, digest_size=8).digest(), "little")

    def _read_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int, *, is_shared: bool
    ) -> list[SamplingParams]:
        """Return parameters for each prompt, as copies if they are shared with the caller."""
        given = self.default_sampling_params() if params is None else params
        many = list(given) if isinstance(given, Sequence) else [given]
        for one in many:
            if not isinstance(one, SamplingParams):
                raise InvalidRequestError(f"sampling_params must be SamplingParams, got {type(one).__name__}")
            if one.stop_strings and self.tokenizer is None:
                raise InvalidRequestError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
            if one.bad_words and self.tokenizer is None:
                raise InvalidRequestError(
                    "bad_words need a tokenizer, and this engine has none: use bad_words_token_ids"
                )
        if isinstance(given, Sequence):
            if len(many) != count:
                raise wrong_number("sampling_params", count, len(many))
            return [self._for_engine(one, is_shared=is_shared) for one in many]
        return [self._for_engine(given, is_shared=is_shared and params is not None)] * count

    def _for_engine(self, params: SamplingParams, *, is_shared: bool) -> SamplingParams:
        """Return the parameters with the fields that only the engine reads: the token ids of bad_words.

        Those of a caller are copied and checked again: fields may have been set since they were made.
        """
        own = msgspec.structs.replace(params) if is_shared else params
        if not own.bad_words or self.tokenizer is None:
            return own
        return own.changed(bad_words_token_ids=bad_words_token_ids(own.bad_words, self.tokenizer))


def _end(process: EngineProcess, supervised: SupervisedEngine | None, timeout: float) -> None:
    """Stop an engine that this process started, within `timeout` seconds."""
    if supervised is not None:
        supervised.close(timeout)
    else:
        process.stop(timeout)
        process.close()
        process.release()


def final_only(params: SamplingParams) -> SamplingParams:
    """Return a copy of these parameters with one output, when the request has finished."""
    return params.changed(output_kind=RequestOutputKind.FINAL_ONLY)


def _check_timeout(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MAX_TIMEOUT_S:  # type: ignore[operator]
        raise ConfigError(f"{name} must be a finite number of seconds, 0 to {_MAX_TIMEOUT_S:g}; got {value!r:.80}")
