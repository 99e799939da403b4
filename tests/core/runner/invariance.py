"""What the tests of numerics level L2 share: tiny models of every kind, a runner that records logits and poisons the
cache, and one request - the target - run through engine, scheduler and runner in any company.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from core.engine import EngineCore
from core.execution.executor import FinishedStep, ModelInfo
from core.execution.plan import SchedulerOutput
from core.execution.state_slots import num_draft_states, num_states
from core.features.store import Features
from core.inputs import EngineInput
from core.model_files.model_config import ModelConfig
from core.models.llama import Llama
from core.models.step import StepResult
from core.runner.accepted import accepted
from core.runner.model_runner import ModelRunner
from core.runner.state_rows import RowStates
from core.runner.step_inputs import StepInputs
from core.scheduling.scheduler import Scheduler
from frontend.client.received_logprobs import ReceivedLogprobs
from ipc.options.config import SchedulingPolicy
from ipc.options.resolved import ResolvedConfig
from ipc.options.speculation import SpeculativeConfig
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import Floats, Int32s, Ints
from ipc.wire.feature_messages import FeatureUse
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import AddRequest, FinishReason
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import load_cpu_library
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from kernels.memory.kv_cache import MixedKVCache
from tests.core.runner.given_features import with_features
from tests.core.runner.heard import Heard
from tests.core.runner.invariance_kinds import KINDS as KINDS
from tests.core.runner.invariance_kinds import TINY as TINY
from tests.core.runner.invariance_kinds import random_weights as random_weights
from tests.numbers import fill_with_nan, nan
from tests.resolved import resolved_config

TARGET = 1000  # number and seed of the request that is watched
TARGET_CLIENT = 7  # has no other request

DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16}


@lru_cache(maxsize=64)
def tiny_model(dtype: Dtype, kind: str = "plain", variant: str | None = None) -> Llama:
    """Return a model of the C kernels, made once: a step of a model leaves nothing for the next."""
    return random_model(KINDS[kind], dtype, variant)


def random_model(config: ModelConfig, dtype: Dtype, variant: str | None = None) -> Llama:
    """variant: of the C kernels; None = the best that this CPU runs."""
    return Llama(config, random_weights(config, dtype).items(), dtype, library=load_cpu_library(variant))


def bits(values: Floats) -> Int32s:
    """float32 -> int32: unlike equality of numbers this tells 0 from -0, and NaN is itself."""
    return values.view(np.int32)


class Recorder(ModelRunner):
    """Keeps every row of logits, as the sampler gets them and as its edits leave them, by (seed, choice, output
    position); a row computed again must have the same bits. Each request of these tests has a seed of its own.

    Before each step NaN goes into every slot of the cache that nobody may read: all but the computed tokens of running
    rows and the free blocks that the prefix cache can find. What the step itself writes is poisoned too.
    """

    scheduler: Scheduler  # whose plans are run; recorded_engine() sets it

    def __init__(self, model: Llama, config: ResolvedConfig, adapters: Any = None, features: Any = None) -> None:
        assert config.num_blocks_override is not None
        num_spare = num_draft_states(config, 4 * model.config.state_size)
        states = model.allocate_states(num_states(config, 4 * model.config.state_size))
        num_on_host = (config.num_swap_blocks or 0) + (config.num_host_blocks or 0)
        self._pages = config.kv_page_blocks or 0
        num_blocks = config.num_blocks_override * max(1, self._pages)
        super().__init__(
            model,
            num_rows=config.max_num_seqs,
            num_blocks=num_blocks,
            num_page_blocks=self._pages,
            block_size=config.block_size,
            eos_token_ids=(0,),
            logprobs_mode=config.logprobs_mode,
            adapters=adapters,
            features=features,
            states=None if states is None else RowStates(states, num_spare),
            num_swap_blocks=num_on_host,
        )
        if states is not None:
            states.fill(np.nan)
        self.logits: dict[tuple[int, int, int], Floats] = {}
        self.edited: dict[tuple[int, int, int], Floats] = {}
        self.num_computed_again = 0  # rows of logits
        self.num_starts = 0  # of the target's first choice
        self.num_poisoned = 0  # slots that held numbers before
        self.places: list[tuple[int, int, int]] = []  # (row, place in the batch, batch size) of the target, by step
        self._is_poisoned = np.zeros((num_blocks, config.block_size), np.bool_)
        self._copied_poison = np.ones((num_on_host, config.block_size), np.bool_)  # of host blocks
        if self._pages:
            self._poison(np.arange(num_blocks) >= self._pages)
        else:
            fill_with_nan(self.cache)
            self._is_poisoned[1:] = True

    def _apply(self, plan: SchedulerOutput) -> None:
        super()._apply(plan)
        if self.states is not None:  # of a row without a request, or with one that begins at its first token
            gone = np.setdiff1d(plan.removed_rows, [new.row for new in plan.starts if new.num_computed_tokens])
            self.states.states[self.states.places[gone]] = np.nan

    def prepare(self, plan: SchedulerOutput) -> StepInputs:
        is_target = (self.sampling.seed[plan.rows] == TARGET) & (self.sampling.choice[plan.rows] == 0)
        for place in np.flatnonzero(is_target).tolist():
            self.places.append((int(plan.rows[place]), place, len(plan.rows)))
        self.num_starts += sum(new.seed == TARGET and new.choice == 0 for new in plan.added)
        self._copied_poison[plan.swapped_out_slots] = self._is_poisoned[plan.swapped_out_blocks]
        self._is_poisoned[plan.copied_to] = self._is_poisoned[plan.copied_blocks]
        self._is_poisoned[plan.swapped_in_blocks] = self._copied_poison[plan.swapped_in_slots]
        is_readable = self._readable_pages() if self._pages else self._readable()
        inputs = super().prepare(plan)
        written = inputs.slots
        for other in inputs.others:
            inside = np.arange(self._pages)[:, None] * self.block_size
            written = np.concatenate([written, (other.slots + inside).reshape(-1)])
        is_readable.reshape(-1)[written] = False
        known = self._is_poisoned.copy()
        self._poison(~is_readable)
        self.num_poisoned += int((self._is_poisoned & ~known).sum())
        self._is_poisoned.reshape(-1)[written] = False
        return inputs

    def _readable(self) -> npt.NDArray[np.bool_]:
        """[blocks, block_size] by the state before the step."""
        pool, table, rows = self.scheduler.pool, self.table, self.scheduler.running
        is_readable = np.repeat(((pool.ref_count == 0) & (pool.names.content != 0))[:, None], self.block_size, 1)
        is_readable[0] = True  # the null block holds zeros
        first = self.scheduler.table.num_released[rows] * self.block_size
        counts = table.num_computed_tokens[rows] - first
        positions = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts - first, counts)
        blocks = table.blocks.get(np.repeat(rows, counts), positions // self.block_size)
        is_readable[blocks, positions % self.block_size] = True
        return is_readable

    def _readable_pages(self) -> npt.NDArray[np.bool_]:
        """As _readable(), where layers with a window have blocks of their own."""
        pool, rows, inside = self.scheduler.pool, self.scheduler.running, np.arange(self._pages)
        windows, names = self.scheduler.batch.others[0].table, pool.names
        is_free = (pool.ref_count == 0).repeat(self._pages)
        found = (names.content != 0) | (names.beside[0].owner != 0).repeat(self._pages)
        is_readable = np.repeat((is_free & found)[:, None], self.block_size, 1)
        is_readable[: self._pages] = True
        for row in rows.tolist():
            end, first = int(self.table.num_computed_tokens[row]), int(windows.num_released[row]) * self.block_size
            places = np.arange(end)
            blocks = self.table.blocks.get(np.full(end, row), places // self.block_size)
            is_readable[blocks, places % self.block_size] = True
            seen = self.table.others[0].blocks.get(np.full(end - first, row), places[first:] // self.block_size)
            is_readable[seen[:, None] + inside, places[first:, None] % self.block_size] = True
        return is_readable

    def _poison(self, where: npt.NDArray[np.bool_]) -> None:
        """where: [blocks, block_size], or [blocks]."""
        fresh = np.broadcast_to(where.reshape(len(where), -1), self._is_poisoned.shape) & ~self._is_poisoned
        slots, cache = np.flatnonzero(fresh), self.cache
        if not len(slots):  # most steps
            return
        if self._pages and isinstance(cache, MixedKVCache):  # tokens of layers with a window are of other widths
            pages = np.broadcast_to(where.reshape(len(where), -1), fresh.shape).reshape(
                -1, self._pages * self.block_size
            )
            fresh = np.repeat(pages.all(1), self._pages)[:, None]
            for array in cache.memory:
                array[fresh[:, 0]] = nan(cache.dtype)
        else:
            for part in cache.parts if isinstance(cache, MixedKVCache) else [cache]:
                assert isinstance(part, CpuKVCache), type(part)
                poison = np.full((len(slots), 2 * part.num_kv_heads * part.head_dim), nan(cache.dtype))
                for layer, blocks in enumerate(part.layers):
                    if len(blocks) == cache.num_blocks:  # others use the same arrays
                        part.write(layer, slots, poison)
        self._is_poisoned |= fresh

    def sample(self, rows: Ints, result: StepResult, offsets: Ints | None = None) -> Int32s:
        logits = result.logits
        positions = self.table.num_tokens[rows] - self.table.num_prompt_tokens[rows]
        if offsets is not None:
            positions += offsets
        columns = (self.sampling.seed[rows], self.sampling.choice[rows], positions)
        raw = logits.copy()
        tokens = super().sample(rows, result, offsets)
        is_kept = np.ones(len(rows), np.bool_) if offsets is None else accepted(rows, offsets, tokens, self.table)
        for index, key in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            if not is_kept[index]:
                continue
            self.num_computed_again += key in self.logits
            for kept, values in ((self.logits, raw[index]), (self.edited, logits[index].copy())):
                before = kept.setdefault(key, values)
                is_same = before is values or np.array_equal(bits(before), bits(values))
                assert is_same, f"(seed, choice, position) {key}: other logits again"
        return tokens


class RecordingExecutor:
    def __init__(self, runner: Recorder) -> None:
        assert isinstance(runner.model, Llama), runner.model
        state_bytes = 4 * runner.model.config.state_size
        self.info = ModelInfo("recorded", "", "float32", 500, 2048, (0,), "L2", state_bytes=state_bytes)
        self.runner = runner

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        return memory_bytes // block_size

    def initialize_cache(self, config: ResolvedConfig) -> None: ...

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        return FinishedStep(self.runner.execute(plan))

    def close(self) -> None: ...


def recorded_engine(
    model: Llama,
    config: ResolvedConfig,
    recorder_type: type[Recorder] = Recorder,
    adapters: Any = None,
    features: Features | None = None,
) -> tuple[EngineCore, Recorder]:
    more = {} if features is None else {"features": features}
    recorder = recorder_type(model, config, adapters, **more)
    engine = EngineCore(config, RecordingExecutor(recorder))
    recorder.scheduler = engine.scheduler
    return engine, recorder


#: Called before each step but the first; what it returns is the step's inbox.
Between = Callable[[EngineCore, Recorder], list[tuple[int, EngineInput]]]


def drive(
    engine: EngineCore, recorder: Recorder, inbox: list[tuple[int, EngineInput]], between: Between | None = None
) -> Heard:
    """Run to the end of the target if it is in the inbox, else to the end of all requests. What is wrong with the
    scheduler's tables stays wrong, so it is looked for in some of the steps; its own tests look in each."""
    targets = [message for _, message in inbox if isinstance(message, AddRequest) and message.number == TARGET]
    ends = {(TARGET, choice) for message in targets for choice in range(message.params.n)}
    heard, step = Heard(TARGET, len(targets[0].prompt_token_ids) // 4 if targets else 0), 0
    while inbox or (ends - heard.finish.keys() if ends else engine.has_unfinished):
        heard.take(engine.step(inbox, 0))
        step += 1
        if step % 8 == 0:
            engine.scheduler.check_integrity()
        inbox = between(engine, recorder) if between else []
    engine.scheduler.check_integrity()
    return heard


class Run(NamedTuple):
    """What one engine made of the target; logits and edited [output tokens, vocab] of each choice."""

    tokens: dict[int, list[int]]
    finish: dict[int, FinishReason]
    logits: dict[int, Floats]
    edited: dict[int, Floats]
    logprobs: dict[int, ReceivedLogprobs]
    recorder: Recorder
    num_cached_tokens: int  # what the prefix cache gave while the target and its neighbours ran

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions of the target's first choice."""
        return self.recorder.num_starts - 1


def request(
    number: int, prompt: Sequence[int], max_tokens: int, temperature: float, **options: Any
) -> tuple[int, AddRequest]:
    wanted = {"top_p": 0.95, "max_tokens": max_tokens, "ignore_eos": True, **options}
    message = AddRequest(
        number,
        np.array(prompt, "<i4").tobytes(),
        SamplingParams(temperature=temperature, **wanted),
        seed=number,
        priority=int(number == TARGET),  # where priorities count, the target gives way to all others
    )
    return TARGET_CLIENT if number == TARGET else 0, message


def with_adapter(sent: tuple[int, AddRequest], digest: str) -> tuple[int, AddRequest]:
    """The request with the adapter of this digest; "" = none."""
    client, message = sent
    return client, msgspec.structs.replace(message, adapter=AdapterId(digest) if digest else None)


def run(
    model: Llama,
    prompt: Sequence[int],
    *,
    neighbours: Sequence[tuple[int, AddRequest]] = (),
    first: Sequence[tuple[int, AddRequest]] = (),
    between: Between | None = None,
    begin: Callable[[EngineCore], None] = lambda engine: None,
    max_tokens: int = 16,
    temperature: float = 0.8,
    params: Mapping[str, Any] | None = None,
    adapters: Any = None,
    adapter: str = "",
    features: Features | None = None,
    uses: Sequence[FeatureUse] = (),
    **settings: Any,
) -> Run:
    """Run `first` to its end, then the target among its neighbours, which were submitted before it. begin: is called
    with the engine before its first step. adapters: as the Recorder has them; adapter: digest of the target's.
    features: what has been put; uses: of the target."""
    settings = {**state_memory(model, settings.get("rows", 33)), **settings}
    engine, recorder = recorded_engine(model, small_config(**settings), adapters=adapters, features=features)
    begin(engine)
    num_encoded = 0 if features is None else features.num_encoded
    drive(engine, recorder, list(first))
    cached = engine.scheduler.stats.prefix_cache_hits
    target = request(TARGET, prompt, max_tokens, temperature, **(params or {}))
    target = with_features(with_adapter(target, adapter), features, uses)
    inbox = [*neighbours, target]
    heard = drive(engine, recorder, list(inbox), between)
    if features is not None:  # otherwise a plan has not said what its step needs
        assert features.num_encoded - num_encoded == engine.scheduler.stats.num_encoder_inputs
    tokens = {choice: ids for (number, choice), ids in heard.tokens.items() if number == TARGET and ids}

    def stacked(kept: dict[tuple[int, int, int], Floats]) -> dict[int, Floats]:
        return {c: np.stack([kept[TARGET, c, position] for position in range(len(tokens[c]))]) for c in tokens}

    return Run(
        tokens,
        {choice: reason for (number, choice), reason in heard.finish.items() if number == TARGET},
        stacked(recorder.logits),
        stacked(recorder.edited),
        heard.logprobs,
        recorder,
        engine.scheduler.stats.prefix_cache_hits - cached,
    )


def state_memory(model: Llama, num_rows: int = 33) -> dict[str, int]:
    """Return the setting by which so many rows and 20 others have recurrent states; empty: the model has none."""
    return {"memory": 2 * 4 * model.config.state_size * (num_rows + 20)} if model.config.state_size else {}


def small_config(
    budget: int = 512,
    num_blocks: int = 400,
    rows: int = 33,
    prefix_caching: bool = True,
    depth: int = 1,
    policy: SchedulingPolicy = "fcfs",
    speculative: SpeculativeConfig | None = None,
    max_loras: int = 0,
    kv_window: int = 0,
    memory: int | None = None,
    kv_page_blocks: int = 0,
    num_swap_blocks: int = 0,
    num_host_blocks: int = 0,
) -> ResolvedConfig:
    return resolved_config(
        preemption_mode="swap" if num_swap_blocks else "recompute",
        num_swap_blocks=num_swap_blocks,
        num_host_blocks=num_host_blocks,
        enable_lora=max_loras > 0,
        max_loras=max_loras or 1,
        executor="fake",  # 'local' knows no depth 2
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        num_blocks_override=num_blocks,
        max_model_len=min(2048, (num_blocks - 1) * 16),
        enable_prefix_caching=prefix_caching,
        async_scheduling=depth == 2,
        scheduling_policy=policy,
        speculative_config=speculative,
        kv_window=kv_window,
        kv_cache_memory_bytes=memory or 1,
        kv_page_blocks=kv_page_blocks,
    )


def difference(got: Run, alone: Run) -> str:
    """What is not bitwise the same in two runs of the target; empty when all is."""
    for what, one, other in (("logits", got.logits, alone.logits), ("edited logits", got.edited, alone.edited)):
        for choice, expected in other.items():
            values = one[choice][: len(expected)]
            wrong = (bits(values) != bits(expected[: len(values)])).any(-1).nonzero()[0].tolist()
            if wrong:
                return f"{what} of choice {choice} differ at output positions {wrong}"
    if got.tokens != alone.tokens or got.finish != alone.finish:
        return f"tokens {got.tokens} ({got.finish}) instead of {alone.tokens} ({alone.finish})"
    return "" if _columns(got) == _columns(alone) else "log probabilities differ"


def _columns(run: Run) -> dict[int, list[tuple[int, bytes, bytes]]]:
    return {
        choice: [(one.rank, one.token_ids.tobytes(), one.values.tobytes()) for one in (*each.prompt, *each.output)]
        for choice, each in run.logprobs.items()
    }


def neighbours(count: int, seed: int, longest: int, max_tokens: int) -> list[tuple[int, AddRequest]]:
    rng = np.random.default_rng(seed)
    return [
        request(n, rng.integers(1, 500, rng.integers(1, longest)).tolist(), int(rng.integers(1, max_tokens)), n % 3 / 2)
        for n in range(1, count + 1)
    ]
