"""The costs of restoring a preempted request, measured on this machine with this model before the first step."""

import statistics
import time
from collections.abc import Callable

import numpy as np

from core.execution.executor import Costs
from core.runner.step_durations import Clock
from ipc.tables.arrays import Int32s
from kernels.memory.kv_cache import KVCache

NUM_TOKENS = 128  # longest timed prompt: a chunk that keeps the processor busy
FIRST_TOKENS = 16  # length of the prompt that tells how long a slow machine would take for NUM_TOKENS
_NUM_BLOCKS = 32  # blocks in one timed copy
_NUM_SAMPLES = 5
_PATIENCE_NS = 200_000_000  # no further sample of a cost starts after this total, not counting the warm-up run
#: Cost of copying a block if there is no swap cache: a second, so that recomputing is always cheaper.
_NO_ROOM_NS = 1_000_000_000


def measure_costs(
    compute: Callable[[int], None],
    sizes: tuple[int, int],
    cache: KVCache,
    swap_cache: KVCache | None,
    wait: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter_ns,
) -> Costs:
    """Return the median costs of recomputing a token and of copying a block, in nanoseconds.

    compute: runs the model on so many tokens. sizes: the fewest and the most tokens to time. wait: returns when the
    device has finished its copies. clock: ranks of a group have one in common, so that they measure equally often. The
    blocks of both caches must be free, because they are overwritten.
    """
    token_ns = max(1, _token_ns(compute, *sizes, clock))
    if swap_cache is None:
        return Costs(token_ns, _NO_ROOM_NS)
    count = min(_NUM_BLOCKS, cache.num_blocks - 1, swap_cache.num_blocks)
    blocks, slots = np.arange(1, count + 1, dtype=np.int32), np.arange(count, dtype=np.int32)

    def copy(source: KVCache, sources: Int32s, target: KVCache, targets: Int32s) -> None:
        source.copy_blocks(sources, target, targets)
        wait()

    out_ns = _median_ns(lambda: copy(cache, blocks, swap_cache, slots), clock)
    back_ns = _median_ns(lambda: copy(swap_cache, slots, cache, blocks), clock)
    return Costs(token_ns, max(1, (out_ns + back_ns) // (2 * count)))


def _token_ns(compute: Callable[[int], None], fewest: int, most: int, clock: Clock) -> int:
    """Time the largest prompt that takes at most _PATIENCE_NS: fewest tokens at least, though they take longer."""
    compute(fewest)  # warm-up: touches memory for the first time
    fewest_ns = _duration_ns(lambda: compute(fewest), clock)
    count = min(most, fewest * _PATIENCE_NS // max(1, fewest_ns))
    if count <= fewest < most:
        return fewest_ns // fewest
    return _samples_median_ns(lambda: compute(count), clock) // count


def _median_ns(work: Callable[[], None], clock: Clock) -> int:
    work()  # warm-up
    return _samples_median_ns(work, clock)


def _samples_median_ns(work: Callable[[], None], clock: Clock) -> int:
    samples: list[int] = []
    while len(samples) < _NUM_SAMPLES and sum(samples) < _PATIENCE_NS:
        samples.append(_duration_ns(work, clock))
    return int(statistics.median(samples))


def _duration_ns(work: Callable[[], None], clock: Clock) -> int:
    begin = clock()
    work()
    return clock() - begin
