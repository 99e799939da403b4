"""ceil_div and round_up: rounding of whole numbers for the kernels; others use ipc/tables/rounding.py."""

from typing import TypeVar

from kernels.arrays import AnyInts

_Number = TypeVar("_Number", int, AnyInts)


def ceil_div(number: _Number, by: int) -> _Number:
    """Return number / by, rounded up."""
    return -(-number // by)


def round_up(number: _Number, to: int) -> _Number:
    """Return the least multiple of `to` that is not below `number`."""
    return ceil_div(number, to) * to
