"""ceil_div and round_up: integer rounding for the kernels; other packages use ipc/tables/rounding.py."""

from typing import TypeVar

from kernels.arrays import AnyInts

_Number = TypeVar("_Number", int, AnyInts)


def ceil_div(number: _Number, by: int) -> _Number:
    """Return number / by, rounded up."""
    return -(-number // by)


def round_up(number: _Number, to: int) -> _Number:
    """Return the smallest multiple of `to` that is at least `number`."""
    return ceil_div(number, to) * to
