"""Elementwise functions on whole vector registers only, so that a number's bits do not depend on where it stands.

torch computes exp2, sigmoid and silu by vector code, two registers at a time, but the last few numbers of every
thread's share, those that do not fill two, by the C library: another last bit now and then. (torch.exp has no such
tail, but wakes all threads for a few thousand numbers, which costs more than the work.) Here every share is a multiple
of two registers.
"""

from collections.abc import Callable

import torch

#: float32 numbers in two of the largest vector registers; those of smaller ones divide it.
LANES = 32

#: Numbers up to which torch keeps an elementwise function on one thread (at::internal::GRAIN_SIZE); of more it gives
#: each thread an equal share.
_GRAIN = 32_768


def in_whole_vectors(function_: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
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
