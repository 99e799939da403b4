"""The costs of restoring a preempted request, measured on this machine with this model before the first step."""

import statistics
import time
from collections.abc import Callable

import numpy as np

from core.execution.executor import Costs
from ipc.tables.arrays import Int32s
from kernels.memory.kv_cache import KVCache

NUM_TOKENS = 128  # length of the timed prompt: a chunk that keeps the processor busy
_NUM_BLOCKS = 32  # blocks in one timed copy
_NUM_SAMPLES = 5
_PATIENCE_NS = 200_000_000  # no further sample of a cost starts after this total, not counting the warm-up run
#: Cost of copying a block if there is no swap cache: a second, so that recomputing is always cheaper.
_NO_ROOM_NS = 1_000_000_000


def measure_costs(
    compute: Callable[[], None],
    num_tokens: int,
    cache: KVCache,
    swap_cache: KVCache | None,
    wait: Callable[[], None] = lambda: None,
) -> Costs:
    """Return the median costs of recomputing a token and of copying a block, in nanoseconds.

    compute: runs the model on num_tokens tokens. wait: returns when the device has finished its copies. The blocks of
    both caches must be free, because they are overwritten.
    """
    token_ns = max(1, _median_ns(compute) // num_tokens)
    if swap_cache is None:
        return Costs(token_ns, _NO_ROOM_NS)
    count = min(_NUM_BLOCKS, cache.num_blocks - 1, swap_cache.num_blocks)
    blocks, slots = np.arange(1, count + 1, dtype=np.int32), np.arange(count, dtype=np.int32)

    def copy(source: KVCache, sources: Int32s, target: KVCache, targets: Int32s) -> None:
        source.copy_blocks(sources, target, targets)
        wait()

    out_ns = _median_ns(lambda: copy(cache, blocks, swap_cache, slots))
    back_ns = _median_ns(lambda: copy(swap_cache, slots, cache, blocks))
    return Costs(token_ns, max(1, (out_ns + back_ns) // (2 * count)))


def _median_ns(work: Callable[[], None]) -> int:
    work()  # warm-up: touches memory for the first time
    samples: list[int] = []
    while len(samples) < _NUM_SAMPLES and sum(samples) < _PATIENCE_NS:
        begin = time.perf_counter_ns()
        work()
        samples.append(time.perf_counter_ns() - begin)
    return int(statistics.median(samples))
