"""ceil_div and round_up: whole numbers rounded up, for the kernels; ipc/rounding.py has the same for the rest."""

from typing import TypeVar

from kernels.arrays import AnyInts

_Number = TypeVar("_Number", int, AnyInts)


def ceil_div(number: _Number, by: int) -> _Number:
    """number / by, rounded up: how many times `by` covers `number`."""
    return -(-number // by)


def round_up(number: _Number, to: int) -> _Number:
    """The least multiple of `to` that is not below `number`."""
    return ceil_div(number, to) * to
