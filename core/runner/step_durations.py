"""The durations of small steps, measured on this machine with this model before the first step."""

import statistics
import time
from collections.abc import Callable

import numpy as np

from core.sampling.sampler import SamplingInputs

_LARGEST = 128  # tokens
_NUM_SAMPLES = 5
#: No further sample of a size, and no further size, begins after so long.
_SIZE_PATIENCE_NS, _PATIENCE_NS = 100_000_000, 2_000_000_000


def measure_steps(step: Callable[[int], None], most: int) -> tuple[int, ...]:
    """Return the median durations of steps of 1, 2, 4, ... tokens, at least 1 ns each.

    step: runs a step of so many tokens. most: tokens that it can run, at least 1.
    """
    durations: list[int] = []
    begin, size = time.perf_counter_ns(), 1
    while size <= min(most, _LARGEST) and time.perf_counter_ns() - begin < _PATIENCE_NS:
        step(size)  # warm-up: memory is touched for the first time
        samples: list[int] = []
        while len(samples) < _NUM_SAMPLES and sum(samples) < _SIZE_PATIENCE_NS:
            start = time.perf_counter_ns()
            step(size)
            samples.append(time.perf_counter_ns() - start)
        durations.append(max(1, int(statistics.median(samples))))
        size *= 2
    return tuple(durations)


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
