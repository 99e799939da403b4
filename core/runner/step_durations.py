"""The durations of small steps, measured on this machine with this model before the first step."""

import time
from collections.abc import Callable

import numpy as np

from core.sampling.sampler import SamplingInputs

_LARGEST = 128  # in tokens
_NUM_ROUNDS = 7
#: No new size is started after the first time, and no new round after the second.
_SIZES_PATIENCE_NS, _PATIENCE_NS = 1_000_000_000, 2_500_000_000


#: Returns a time in ns since an arbitrary moment.
Clock = Callable[[], int]


def measure_steps(
    step: Callable[[int], None], most: int, used: Clock = time.perf_counter_ns, clock: Clock = time.perf_counter_ns
) -> tuple[int, ...]:
    """Return the durations of steps of 1, 2, 4, ... tokens in ns, at least 1 each.

    The sizes take turns, and the shortest duration of each counts. So other work on the machine, which comes and goes,
    does not make one size look cheap relative to another.

    step: runs a step of the given number of tokens. most: the most tokens that it can run, at least 1. used: clock for
    the duration of a step. clock: limits the total time.
    """
    begin, durations = clock(), dict[int, int]()
    sizes = trial_sizes(most)
    for round_ in range(_NUM_ROUNDS):
        for size in sizes if round_ == 0 else list(durations):
            if round_ == 0:
                if clock() - begin > _SIZES_PATIENCE_NS:
                    break
                step(size)  # warm-up: memory is touched for the first time
            start = used()
            step(size)
            taken = max(1, used() - start)
            durations[size] = min(durations.get(size, taken), taken)
        if clock() - begin > _PATIENCE_NS:
            break
    return tuple(durations.values())


def trial_sizes(most: int) -> list[int]:
    """Return the sizes to measure, in tokens, none larger than `most`."""
    return [1 << power for power in range(_LARGEST.bit_length()) if 1 << power <= most]


def trial_sampling(count: int) -> SamplingInputs:
    """Return the sampler's inputs for `count` tokens drawn at temperature 1."""
    return SamplingInputs(
        temperature=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int64),
        top_p=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32),
        seed=np.zeros(count, np.uint64),
        position=np.arange(count),
        choice=np.zeros(count, np.int64),
    )
