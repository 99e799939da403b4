"""minimize: the smallest part of a list with which something still fails (Zeller and Hildebrandt, TSE 2002)."""

from collections.abc import Callable, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")


def minimize(items: Sequence[_Item], fails: Callable[[list[_Item]], bool]) -> list[_Item]:
    """Return a part of the items, in their order, that fails, and does not without any one of them (ddmin).

    fails: of a part; it holds for all of the items.
    """
    left, parts = list(items), 2
    while len(left) >= 2:
        size = max(1, len(left) // parts)
        for begin in range(0, len(left), size):
            without = left[:begin] + left[begin + size :]
            if without and fails(without):
                left, parts = without, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(left), 2 * parts)
    return left


def smallest(number: int, least: int, fails: Callable[[int], bool]) -> int:
    """Return a number from `least` to `number` that fails, and most likely not the one below. `number` fails."""
    if number <= least or fails(least):
        return min(number, least)
    low, high = least, number  # low does not fail, high does
    while high - low > 1:
        middle = (low + high) // 2
        if fails(middle):
            high = middle
        else:
            low = middle
    return high
