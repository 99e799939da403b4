"""The costs of preemption are measured on the real model, a few samples each, and disturb nobody."""

from typing import Any

import pytest

from core.runner.model_runner import ModelRunner
from core.runner.preemption_costs import measure_costs
from kernels.elements import FLOAT32
from kernels.memory.kv_cache import KVCache
from tests.core.runner.test_invariance import tiny_model

MS = 1_000_000  # ns


class Clock:
    """The measurement's clock: time passes only in the work that is measured."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class TimedCache(KVCache):
    """Copies take their time on the clock."""

    clock: Clock
    copy_ns = 0
    num_copies = 0

    def copy_blocks(self, *arguments: Any) -> None:
        self.clock.now_ns += self.copy_ns
        self.num_copies += 1
        super().copy_blocks(*arguments)


@pytest.fixture(name="clock")
def fake_clock() -> Clock:
    return Clock()


def cache(num_blocks: int, clock: Clock, copy_ns: int) -> TimedCache:
    made = TimedCache(1, num_blocks, 4, 1, head_dim=8, dtype=FLOAT32)
    made.clock, made.copy_ns = clock, copy_ns
    return made


def runner(num_blocks: int, num_swap_blocks: int, block_size: int) -> ModelRunner:
    return ModelRunner(
        tiny_model(FLOAT32),
        num_rows=4,
        num_blocks=num_blocks,
        block_size=block_size,
        eos_token_ids=(0,),
        num_swap_blocks=num_swap_blocks,
    )


@pytest.mark.parametrize(("num_blocks", "num_swap_blocks", "block_size"), [(2, 1, 1), (64, 40, 16), (3, 1, 128)])
def test_a_real_model_is_measured_on_caches_of_any_size(num_blocks: int, num_swap_blocks: int, block_size: int) -> None:
    one = runner(num_blocks, num_swap_blocks, block_size)
    costs = one.measure_costs()
    assert costs.recompute_ns_per_token > 100  # no machine runs a forward pass in less
    assert costs.swap_ns_per_block >= 1
    assert not one.cache.keys(0)[0].any(), "the null block was written"


def test_without_room_on_the_host_swapping_is_never_the_cheaper_way(clock: Clock) -> None:
    def compute(_: int) -> None:
        clock.now_ns += 100 * MS

    costs = measure_costs(compute, (16, 128), cache(40, clock, 0), None, clock=clock)
    assert costs.swap_ns_per_block > 128 * costs.recompute_ns_per_token  # of the largest block


def test_each_cost_is_the_median_of_its_own_work(clock: Clock) -> None:
    durations = iter([900, 30, 20, 40, 10, 30, 25])  # ms; the first warms up, the second tells that 10 tokens are quick

    def compute(_: int) -> None:
        clock.now_ns += next(durations) * MS

    costs = measure_costs(compute, (10, 10), cache(40, clock, 6 * MS), cache(20, clock, 2 * MS), clock=clock)
    assert costs.recompute_ns_per_token == 25 * MS // 10
    assert costs.swap_ns_per_block == (6 + 2) * MS // 2 // 20  # both ways together, of the 20 blocks that fit


@pytest.mark.parametrize(("token_ms", "longest"), [(1, 128), (4, 50), (10, 20), (1000, 16)])
def test_a_slower_machine_times_a_shorter_prompt(clock: Clock, token_ms: int, longest: int) -> None:
    calls: list[int] = []

    def compute(num_tokens: int) -> None:
        calls.append(num_tokens)
        clock.now_ns += num_tokens * token_ms * MS

    slow, host = cache(40, clock, 500 * MS), cache(40, clock, 1)
    assert measure_costs(compute, (16, 128), slow, host, clock=clock).recompute_ns_per_token == token_ms * MS
    assert calls[:2] == [16, 16]
    assert max(calls) == longest
    assert len(calls) == (2 if longest == 16 else 3 if longest < 128 else 4)
    assert slow.num_copies == 2  # the warm-up and one sample
    assert host.num_copies == 6  # a fast one takes five samples
