"""The time of a step by phase: schedule, prepare, forward, sample, update and encode, for batches of several sizes.

The operations of the forward pass are also timed one by one, called one after the other instead of all in one call.
The engine runs in this process. Every request decodes one token a step, after a prompt of _PROMPT tokens. Times are
medians over steps, in microseconds; host_us is the time that this thread takes outside the forward pass.
"""

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np

from core.engine import EngineCore
from core.executors.local import LocalExecutor
from core.models.layers.layer import Layer
from core.models.llama import Llama
from core.models.operations.cpu_operations import CpuAttend
from core.models.operations.unchanged import unchanged
from core.models.step import ModelInputs, StepResult
from core.process.resolve import resolve
from ipc.errors import ConfigError
from ipc.machine.memory import usable_memory_bytes
from ipc.options.config import EngineConfig
from ipc.tables.rounding import ceil_div
from ipc.version import NAME, VERSION
from ipc.wire.messages import AddRequest, encode
from tools.lab.bench.runs import request_params
from tools.lab.bench.workloads import ID_LOW

SIZES = (1, 8, 32, 256)
_PROMPT = 64  # tokens
_STEPS = 40
_STEPS_ONE_BY_ONE = 10


class Watch:
    """Wall seconds by phase, and this thread's CPU seconds outside the forward pass, for each step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.host: list[float] = []
        self._wall = self._thread = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._wall, self._thread = time.perf_counter(), time.thread_time()
        self.host.append(0.0)

    def stop(self, name: str) -> None:
        """Count the time since start() or the last stop() as the phase `name`."""
        self.seconds[name].append(time.perf_counter() - self._wall)
        if name != "forward":
            self.host[-1] += time.thread_time() - self._thread
        self._wall, self._thread = time.perf_counter(), time.thread_time()


class _Watched:
    """A model that reports its forward passes to a watch; everything else is the model's."""

    def __init__(self, model: Llama, watch: Watch) -> None:
        self._model, self._watch = model, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, inputs: ModelInputs) -> StepResult:
        self._watch.stop("prepare")
        result = self._model.forward(inputs)
        self._watch.stop("forward")
        return result


class _OneByOne(_Watched):
    """A model that runs one operation after another, and times each under its name in the layer."""

    def __init__(self, model: Llama, watch: Watch) -> None:
        super().__init__(copy.copy(model), watch)
        self.seconds: dict[str, float] = defaultdict(float)
        self._model.layers = [self._timed_layer(layer) for layer in model.layers]

    def forward(self, inputs: ModelInputs) -> StepResult:
        hidden = self._model.hidden_states(inputs)
        result: StepResult = _Timed(self._model.result, "head", self.seconds)(hidden, inputs.logits_rows)
        return result

    def _timed_layer(self, layer: Layer) -> Layer:
        timed = self._timed(layer, "input_norm", "attention_out", "mlp_norm", "mlp_out")
        mlp: Any = layer.mlp
        mlp = replace(mlp, **self._timed(mlp, *(field.name for field in fields(mlp))))
        mix: Any = _Timed(layer.mixer.mix, "attention", self.seconds)
        if isinstance(layer.mixer.mix, CpuAttend):
            rope: Any = _Timed(layer.mixer.mix.rope, "rope", self.seconds)
            inner: Any = _Timed(layer.mixer.mix.attention, "attention", self.seconds)
            mix = replace(layer.mixer.mix, rope=rope, attention=inner)
        mixer = replace(layer.mixer, **self._timed(layer.mixer, "qkv", "o"), mix=mix)
        return replace(layer, **timed, mixer=mixer, mlp=mlp)

    def _timed(self, owner: Any, *names: str) -> dict[str, Any]:
        """Return these parts of a layer or an MLP, timed under their names."""
        parts = {name: getattr(owner, name) for name in names}
        return {name: _Timed(part, name, self.seconds) for name, part in parts.items() if part is not unchanged}


class _Timed:
    """An operation whose calls are timed under a name."""

    def __init__(self, operation: Any, name: str, seconds: dict[str, float]) -> None:
        self._operation, self._name, self._seconds = operation, name, seconds

    def __call__(self, *args: Any) -> Any:
        return self._time(self._operation, *args)

    def after(self, *args: Any) -> Any:
        return self._time(self._operation.after, *args)

    def _time(self, operation: Any, *args: Any) -> Any:
        begin = time.perf_counter()
        result = operation(*args)
        self._seconds[self._name] += time.perf_counter() - begin
        return result


def measure_step(config: EngineConfig, rep: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each batch size. Errors: the executor's; ConfigError for a model of transformers' code."""
    length = _PROMPT + _STEPS + _STEPS_ONE_BY_ONE + 2
    blocks = SIZES[-1] * ceil_div(length, config.block_size) + 1
    executor = LocalExecutor(config)
    sized = msgspec.structs.replace(
        config,
        num_blocks_override=blocks,
        max_model_len=length,
        max_num_seqs=SIZES[-1],
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )
    blocks_in = executor.determine_num_available_blocks
    resolved = resolve(sized, executor.info, blocks_in, total_memory_bytes=usable_memory_bytes(), num_cpus=1)
    executor.initialize_cache(resolved)
    model = executor.runner.model
    if not isinstance(model, Llama):
        raise ConfigError(
            f"bench step measures models implemented here; {executor.info.name} runs through transformers' code"
        )
    common: dict[str, Any] = {
        "engine": NAME,
        "version": VERSION,
        "workload": "step",
        "model": executor.info.name,
    }
    common |= {"dtype": executor.info.dtype, "kernels": model.layers[0].mixer.qkv.variant.partition("[")[0], "rep": rep}
    for size in SIZES:
        yield common | {"batch": size, **_measure(EngineCore(resolved, executor), executor, model, size)}


def _measure(engine: EngineCore, executor: LocalExecutor, model: Llama, size: int) -> dict[str, Any]:
    params = request_params(_STEPS + _STEPS_ONE_BY_ONE + 1)
    prompts = np.random.default_rng(size).integers(ID_LOW, model.vocab_size, (size, _PROMPT), np.int32)
    runner, watch = executor.runner, Watch()
    one_by_one = _OneByOne(model, watch)
    try:
        engine.step([(0, AddRequest(n, ids.tobytes(), params, seed=n)) for n, ids in enumerate(prompts)], 0)
        while engine.count_waiting()[0] or engine.scheduler.stats.num_generation_tokens < size:
            engine.step([], 0)
        runner.model = _Watched(model, watch)
        steps = [_watched_step(engine, executor, watch) for _ in range(_STEPS)]
        runner.model = one_by_one
        for _ in range(_STEPS_ONE_BY_ONE):
            engine.step([], 0)
    finally:
        runner.model = model
    return {
        "step_us": _microseconds(statistics.median(steps)),
        **{f"{name}_us": _microseconds(statistics.median(times)) for name, times in watch.seconds.items()},
        "host_us": _microseconds(statistics.median(watch.host)),
        "operations_us": {
            name: _microseconds(seconds / _STEPS_ONE_BY_ONE) for name, seconds in one_by_one.seconds.items()
        },
    }


def _watched_step(engine: EngineCore, executor: LocalExecutor, watch: Watch) -> float:
    """Run EngineCore.step() at depth 1, divided into its phases, and return its seconds."""
    begin = time.perf_counter()
    watch.start()
    plan = engine.scheduler.schedule(0)
    watch.stop("schedule")
    output = executor.execute(plan).result()
    watch.stop("sample")
    messages = engine.scheduler.update_from_output(plan, output)
    watch.stop("update")
    for _, message in messages:
        encode(message)
    watch.stop("encode")
    return time.perf_counter() - begin


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
