"""A real model with too few blocks, under every policy and way of preemption: tokens are those of an unhurried run.

The model is tiny and random; its cache is full of NaN where nobody has written, on the device and on the host.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from core.engine import EngineCore
from core.execution.executor import Costs, FinishedStep, ModelInfo
from core.execution.plan import SchedulerOutput
from core.models.llama import Llama
from core.runner.model_runner import ModelRunner
from ipc.options.resolved import ResolvedConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, Outputs
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from tests.core.runner.invariance import DTYPES, TINY, random_model
from tests.in_turn import in_turn
from tests.numbers import fill_with_nan
from tests.resolved import resolved_config

BLOCK_SIZE = 8
SMALL = msgspec.structs.replace(
    TINY, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256
)
#: For auto: whole blocks are cheaper to copy (74 against 80), a short one beside few whole ones to compute again.
AUTO_COSTS = {"recompute_ns_per_token": 10, "swap_ns_per_block": 37}


class Executor:
    def __init__(self, model: Llama, config: ResolvedConfig) -> None:
        self.info = ModelInfo("small", "", "", SMALL.vocab_size, 256, (0,), "L2")
        self.runner = ModelRunner(
            model,
            num_rows=config.max_num_seqs,
            num_blocks=config.num_blocks_override or 0,
            block_size=config.block_size,
            eos_token_ids=(0,),
            num_swap_blocks=config.num_host_slots,
        )
        for cache in (self.runner.cache, self.runner.swap_cache):
            if cache is not None:
                fill_with_nan(cache)  # what nobody stored must not be read

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        return memory_bytes // block_size

    def initialize_cache(self, config: ResolvedConfig) -> None: ...

    def measure_costs(self) -> Costs:
        return self.runner.measure_costs()

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        return FinishedStep(self.runner.execute(plan))

    def close(self) -> None: ...


class Run(NamedTuple):
    tokens: dict[tuple[int, int], list[int]]  # by (client, number)
    num_swapped: int  # preemptions that copied blocks to the host
    num_dropped: int  # preemptions whose tokens were computed again
    num_swapped_in_blocks: int
    num_skipped: int
    num_host_hits: int  # blocks that the KV cache had evicted


@lru_cache(2)
def model(dtype: Dtype) -> Llama:
    return random_model(SMALL, dtype)


def requests() -> list[tuple[int, int, AddRequest]]:
    """(step in which it arrives, client, message): two clients, three priorities, shared beginnings, half of them
    sampled with a seed."""
    rng = np.random.default_rng(3)
    shared = rng.integers(1, SMALL.vocab_size, 20)
    made = []
    for number in range(10):
        own = rng.integers(1, SMALL.vocab_size, int(rng.integers(3, 30)))
        prompt = np.concatenate([shared, own]) if number % 3 == 0 else own
        params = SamplingParams(
            temperature=number % 2 * 0.9, top_p=0.95, max_tokens=int(rng.integers(16, 34)), ignore_eos=True
        )
        message = AddRequest(
            number, prompt.astype("<i4").tobytes(), params, seed=100 + number, priority=2 - number * 3 // 10
        )
        made.append((number * 3, number // 2 % 2, message))
    return made


def run(dtype: Dtype, **options: Any) -> Run:
    given = {"num_swap_blocks": 0, "recompute_ns_per_token": 1, "swap_ns_per_block": 1, **options}
    config = resolved_config(block_size=BLOCK_SIZE, max_model_len=96, max_num_batched_tokens=24, **given)
    engine = EngineCore(config, Executor(model(dtype), config))
    tokens: dict[tuple[int, int], list[int]] = {}
    waiting, step, causes, num_skipped = requests(), 0, list[int](), 0
    while waiting or engine.has_work:
        inbox = [(client, message) for due, client, message in waiting if due <= step]
        waiting = [entry for entry in waiting if entry[0] > step]
        for client, message in engine.step(inbox, step):
            assert isinstance(message, Outputs), message
            numbers, values = np.frombuffer(message.numbers, "<u4"), np.frombuffer(message.tokens, "<i4")
            for number, token in zip(numbers.tolist(), values.tolist(), strict=True):
                tokens.setdefault((client, number), []).append(token)
        engine.scheduler.check_integrity()
        decision = engine.scheduler.decision
        assert decision is not None
        assert step < 2000, "no progress"
        causes += [preempted.num_swapped_blocks for preempted in decision.preempted]
        num_skipped += decision.num_skipped
        step += 1
    assert len(tokens) == len(requests())
    num_swapped = sum(count > 0 for count in causes)
    stats, num_host_hits = engine.scheduler.stats, engine.scheduler.batch.host_cache.num_hits
    return Run(tokens, num_swapped, len(causes) - num_swapped, stats.num_swapped_in_blocks, num_skipped, num_host_hits)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_what_the_host_keeps_has_the_bits_that_were_computed(mode: str, dtype: Dtype) -> None:
    slots = 0 if mode == "recompute" else 12
    options = {"preemption_mode": mode, "num_swap_blocks": slots, "num_host_blocks": 30}
    kept = run(dtype, max_num_seqs=6, num_blocks_override=14, **options)
    assert kept.tokens == unhurried(dtype).tokens
    assert kept.num_host_hits > 0


@lru_cache(2)
def unhurried(dtype: Dtype) -> Run:
    """One after the other, with room for all."""
    return run(dtype, max_num_seqs=1, num_blocks_override=100, enable_prefix_caching=False)


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["cache", "no cache"])
@pytest.mark.parametrize(
    ("mode", "policy", "dtype"),
    in_turn(["recompute", "swap", "auto"], ["fcfs", "priority", "fair"], DTYPES),
)
def test_tokens_are_those_of_an_unhurried_run(mode: str, policy: str, caching: bool, dtype: str) -> None:
    costs = AUTO_COSTS if mode == "auto" else {}
    pressed = run(
        DTYPES[dtype],
        max_num_seqs=6,
        num_blocks_override=14,
        enable_prefix_caching=caching,
        scheduling_policy=policy,
        fair_quantum=8,
        preemption_mode=mode,
        num_swap_blocks=0 if mode == "recompute" else 12,
        **costs,
    )
    calm = unhurried(DTYPES[dtype])
    assert calm.num_swapped == calm.num_dropped == 0
    assert pressed.tokens == calm.tokens
    if mode == "recompute":
        assert pressed.num_swapped == 0
        assert pressed.num_dropped > 0
    else:
        assert pressed.num_swapped > 0
        assert pressed.num_swapped_in_blocks > 0
    if mode == "auto":
        assert pressed.num_dropped > 0
