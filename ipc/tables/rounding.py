"""ceil_div and round_up: integers or columns of them rounded up, for sizes in blocks and pages.

kernels/rounding.py has copies of them for the kernels, which import no other package of the project.
"""

from typing import TypeVar

from ipc.tables.arrays import AnyInts

_Number = TypeVar("_Number", int, AnyInts)


def ceil_div(number: _Number, by: int) -> _Number:
    """Return number / by, rounded up."""
    return -(-number // by)


def round_up(number: _Number, to: int) -> _Number:
    """Return the smallest multiple of `to` that is not below `number`."""
    return ceil_div(number, to) * to
