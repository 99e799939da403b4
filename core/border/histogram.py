"""Samples: values gathered in a list, and counted in the buckets of their histograms when somebody asks."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

from ipc.wire.metrics_messages import Histogram

_MOST_KEPT = 1024  # rows of values that wait to be counted


class Samples:
    """Histograms that get their values together: one row has a value for each, nan = none.

    bounds: upper bounds of the buckets, by the name of the histogram.
    """

    def __init__(self, bounds: Mapping[str, Sequence[float]]) -> None:
        self._bounds = {name: np.array(each, np.float64) for name, each in bounds.items()}
        self._lists = [list(each) for each in bounds.values()]
        self._counts = {name: np.zeros(len(each) + 1, np.int64) for name, each in bounds.items()}
        self._totals = dict.fromkeys(bounds, 0.0)
        self._rows: list[Sequence[float]] = []
        self._first = next(iter(bounds))

    def add(self, row: Sequence[float]) -> None:
        """Take a value for each histogram, in the order of their names."""
        self._rows.append(row)
        if len(self._rows) >= _MOST_KEPT:
            self._count()

    def add_many(self, value: float, count: int) -> None:
        """Take one value `count` times, for the first histogram."""
        self._counts[self._first][bisect_left(self._lists[0], value)] += count
        self._totals[self._first] += value * count

    def histograms(self) -> dict[str, Histogram]:
        """Return all histograms by name."""
        self._count()
        return {
            name: Histogram(bounds.tolist(), self._counts[name].tolist(), self._totals[name])
            for name, bounds in self._bounds.items()
        }

    def _count(self) -> None:
        if not self._rows:
            return
        columns = np.array(self._rows, np.float64).T
        self._rows = []
        for (name, bounds), column in zip(self._bounds.items(), columns, strict=True):
            values = column[~np.isnan(column)]
            buckets = np.searchsorted(bounds, values, side="left")
            self._counts[name] += np.bincount(buckets, minlength=len(bounds) + 1)
            self._totals[name] += float(values.sum())


def decades(highest: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `highest`: vLLM's buckets of numbers of tokens."""
    values: list[float] = []
    unit = 1
    while True:
        for factor in (1, 2, 5):
            if unit * factor > highest:
                return tuple(values)
            values.append(float(unit * factor))
        unit *= 10
