"""Elementwise functions on whole vector registers only, so that a number's bits do not depend on where it stands.

torch computes exp2, sigmoid and silu by vector code, two registers at a time, but the last few numbers of every
thread's share, those that do not fill two, by the C library: another last bit now and then. (torch.exp has no such
tail, but wakes all threads for a few thousand numbers, which costs more than the work.) Here every share is a multiple
of two registers.
"""

from collections.abc import Callable
from functools import lru_cache

import torch

ElementwiseInPlace = Callable[[torch.Tensor], torch.Tensor]

#: float32 numbers in two of the largest vector registers; those of smaller ones divide it.
LANES = 32

#: Numbers up to which torch keeps an elementwise function on one thread (at::internal::GRAIN_SIZE); of more it gives
#: each thread an equal share.
_GRAIN = 32_768


def in_whole_vectors(function_: ElementwiseInPlace, x: torch.Tensor) -> torch.Tensor:
    """Apply an in-place elementwise function to x: float32, contiguous, a multiple of LANES numbers."""
    numbers = x.view(-1)
    count = len(numbers)
    assert count % LANES == 0, f"{count} numbers are no multiple of {LANES}"
    if count <= _GRAIN:
        function_(numbers)
        return x
    parallel = count // (_GRAIN * torch.get_num_threads()) * _GRAIN * torch.get_num_threads()
    if parallel:
        function_(numbers[:parallel])  # every thread's share is a multiple of the grain
    for first in range(parallel, count, _GRAIN):
        function_(numbers[first : first + _GRAIN])
    return x


def is_position_independent(function_: ElementwiseInPlace) -> bool:
    """Probe: whether in_whole_vectors gives equal numbers equal bits at any place, in this build, on these threads."""
    return _probe(function_, torch.get_num_threads())


@lru_cache(maxsize=16)
def _probe(function_: ElementwiseInPlace, num_threads: int) -> bool:
    period = torch.linspace(-20.0, 5.0, 63 * LANES)  # runs against every power of two
    repeats = _GRAIN * (num_threads + 2) // len(period)
    result = in_whole_vectors(function_, period.repeat(repeats)).view(repeats, -1)
    alone = torch.cat([in_whole_vectors(function_, part.clone()) for part in torch.split(period, LANES)])
    return bool((result == alone).all())
