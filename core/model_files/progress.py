"""Reports the progress of loading: how many of a model's weights have been taken."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

Item = TypeVar("Item")

_INTERVAL_S = 1.0  # between two reports, so that a small model has none

_follower: Callable[[float], None] | None = None


@contextlib.contextmanager
def following(tell: Callable[[float], None]) -> Iterator[None]:
    """During this context, call `tell` about once a second with the fraction of the weights that were taken."""
    global _follower
    before, _follower = _follower, tell
    try:
        yield
    finally:
        _follower = before


def tell(share: float) -> None:
    """Report the progress of another process that is loading the weights."""
    if _follower is not None:
        _follower(share)


def counted(weights: Iterator[tuple[str, Item]], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Item]]:
    """Yield the weights, and report the progress. shapes: those of all weights, by name."""
    taken, total, told = 0, sum(map(math.prod, shapes.values())), time.monotonic()
    for name, weight in weights:
        yield name, weight
        taken += math.prod(shapes[name])
        if _follower is not None and time.monotonic() >= told + _INTERVAL_S:
            told = time.monotonic()
            _follower(taken / total)
