"""LLMEngine: requests step by step, for programs written for vLLM's class of this name."""

import weakref
from collections.abc import Iterable
from types import SimpleNamespace
from typing import NamedTuple, Self

import numpy as np

from frontend.absent_methods import AbsentMethods
from frontend.call_arguments import check_neutral
from frontend.client.client import EngineClient
from frontend.engine_args import EngineArgs, open_engine
from frontend.lora import LoRARequest
from frontend.results.outputs import RequestOutput
from frontend.results.request_state import RequestState
from frontend.session import EngineHandle
from frontend.text.prompt_forms import PromptInput
from frontend.text.prompts import split_prompts
from frontend.text.tokenizer import Tokenizer
from frontend.weights import PushedWeights, WeightMethods
from ipc.errors import EngineCoreError, EngineDeadError, InvalidRequestError
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import ModelInformation, Statistics

#: vLLM's name of a metric -> field of Statistics.
_COUNTERS = {
    "vllm:num_preemptions": "num_preemptions",
    "vllm:prompt_tokens": "num_prompt_tokens",
    "vllm:generation_tokens": "num_generation_tokens",
    "vllm:prefix_cache_queries": "prefix_cache_queries",
    "vllm:prefix_cache_hits": "prefix_cache_hits",
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
}
_GAUGES = {"vllm:num_requests_running": "num_running", "vllm:num_requests_waiting": "num_waiting"}


class Gauge(NamedTuple):
    """A current value."""

    name: str
    labels: dict[str, str]
    value: float


class Counter(NamedTuple):
    """A number that only increases."""

    name: str
    labels: dict[str, str]
    value: int


class Vector(NamedTuple):
    """Numbers that only increase."""

    name: str
    labels: dict[str, str]
    values: list[int]


class ModelDescription(NamedTuple):
    """An engine's model, under vLLM's names of a ModelConfig."""

    model: str
    max_model_len: int
    dtype: str
    vocab_size: int

    def get_vocab_size(self) -> int:
        """Return the size of the model's vocabulary."""
        return self.vocab_size


def describe_model(information: ModelInformation) -> ModelDescription:
    """Return an engine's description of its model, under vLLM's names."""
    one = information
    return ModelDescription(one.model_name, one.max_model_len, one.dtype, one.vocab_size)


def read_metrics(statistics: Statistics, model: str) -> list[Gauge | Counter | Vector]:
    """Return an engine's counters and gauges over all clients, under vLLM's names; the vector only after drafts."""
    labels = {"model_name": model, "engine": "0"}
    gauges = [Gauge(name, labels, float(getattr(statistics, field))) for name, field in _GAUGES.items()]
    used = 1 - statistics.num_free_blocks / max(1, statistics.num_blocks - 1)
    gauges.append(Gauge("vllm:kv_cache_usage_perc", labels, used))
    counters = [Counter(name, labels, getattr(statistics, field)) for name, field in _COUNTERS.items()]
    accepted = statistics.num_accepted_tokens_per_pos
    vectors = [Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, accepted)] if accepted else []
    return [*gauges, *counters, *vectors]


class LLMEngine(WeightMethods, AbsentMethods):
    """An engine to which requests are added, and whose outputs are fetched by step().

    The engine runs its steps by itself: step() waits until there is something new for a request. All methods are for
    one thread.
    """

    def __init__(self, engine: EngineHandle) -> None:
        self._engine = engine
        self._states: dict[str, RequestState] = {}
        self._model: ModelDescription | None = None
        #: What programs for vLLM find of the model, which is in the engine's process: load_weights(). Some delete it.
        self.pushed = PushedWeights(engine.client)
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self.pushed))
        self.model_executor: object = SimpleNamespace(driver_worker=runner)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: object) -> Self:
        """Start an engine with these arguments. others: vLLM's, for its logging. Errors: those of LLM().

        It ends with close(), or when the object is collected.
        """
        engine = open_engine(engine_args)
        made = cls(engine)
        weakref.finalize(made, engine.close)
        return made

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: None = None,
        trace_headers: None = None,
        priority: int = 0,
        prompt_text: str | None = None,
    ) -> None:
        """Submit a request under a name. arrival_time, trace_headers, prompt_text: vLLM's, without effect.

        Errors: InvalidRequestError, also for a name in use and for more than one prompt.
        """
        check_neutral(tokenization_kwargs=tokenization_kwargs)
        if not isinstance(request_id, str):
            raise InvalidRequestError(f"request_id must be a str, got {type(request_id).__name__}")
        if request_id in self._states:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by a live request; use another")
        prompts = split_prompts(prompt)
        if len(prompts) != 1:
            raise InvalidRequestError(f"add_request() takes one prompt; got {len(prompts)}")
        self.pushed.flush()
        (prepared,) = self._engine.prepare(prompts, params, priority, lora=lora_request)
        self._states[request_id] = self._engine.submit(prepared, request_id)

    def step(self) -> list[RequestOutput]:
        """Wait until there is something new, and return the outputs that have changed; [] if no request is live.

        Errors: EngineDeadError; RequestFailedError for a request that the engine failed, which is then removed.
        """
        outputs: list[RequestOutput] = []
        while self._states and not outputs:
            by_number = {state.number: name for name, state in self._states.items()}
            for number in self._client.wait(np.fromiter(by_number, np.int64, len(by_number)), None).tolist():
                name = by_number[number]
                try:
                    output = self._engine.advance(self._states[name])
                except EngineDeadError:
                    raise
                except EngineCoreError:
                    self._forget(name)
                    raise
                if output is not None:
                    outputs.append(output)
                    if output.finished:
                        self._forget(name)
        return outputs

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Abort and remove requests; unknown names are ignored."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            if name in self._states:
                self._forget(name)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of live requests."""
        return len(self._states)

    def has_unfinished_requests(self) -> bool:
        """Return whether a request is live."""
        return bool(self._states)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Errors: InvalidRequestError if there is none."""
        return self._engine.need_tokenizer()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer; None if there is none."""
        return self._engine.tokenizer

    @property
    def model_config(self) -> ModelDescription:
        """Return the engine's model configuration. Errors: CallFailedError, EngineDeadError."""
        if self._model is None:
            self._model = describe_model(self._client.model_information())
        return self._model

    def get_model_config(self) -> ModelDescription:
        """Return model_config."""
        return self.model_config

    def get_metrics(self) -> list[Gauge | Counter | Vector]:
        """Return the engine's counters and gauges over all clients. Errors: CallFailedError, EngineDeadError."""
        return read_metrics(self._client.statistics(), self._client.welcome.model_name)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks that no running request holds, and use weights that were pushed.

        Errors: CallFailedError, EngineDeadError.
        """
        self.pushed.flush()
        self._client.reset_prefix_cache()
        return True

    def check_health(self, timeout: float = 10.0) -> None:
        """Check that the engine answers within `timeout` seconds. Errors: EngineDeadError, CallFailedError."""
        self._client.statistics(timeout)

    @property
    def errored(self) -> bool:
        """Return whether the session has ended, so that every call would fail."""
        return self._client.error is not None

    def close(self) -> None:
        """End the session, and stop the engine if from_engine_args() started it. A second call does nothing."""
        self._engine.close()

    @property
    def _client(self) -> EngineClient:
        return self._engine.client

    def _forget(self, name: str) -> None:
        self._client.discard([self._states.pop(name).number])
