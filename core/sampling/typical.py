"""Typical: the option typical_p, which keeps the tokens whose surprise is near the one that is expected.

A token's surprise is -log(its probability); its expectation is the entropy. Tokens are taken in the order of the
distance between the two, until their probabilities add up to more than typical_p (Meister et al. 2022, arXiv
2202.00666). As in llama.cpp, this comes behind top_k and before top_p, min_p and the temperature.
"""

from typing import NamedTuple

import numpy as np

from core.sampling.edit_group import Logits
from core.sampling.filters import BUCKETS, left_of_row
from core.sampling.number_options import NumberOptions
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import Bools, Doubles, Floats, Int32s, Ints, Positions, Rows

_ALL, _NONE = np.ones(1, np.float32), np.zeros(1, np.float32)  # top_p and min_p that leave all tokens


class Typical(NumberOptions):
    """The rows with typical_p."""

    options = ("typical_p",)
    reads = ("top_k",)

    def is_enabled(self, params: SamplingParams) -> bool:
        """Return whether these parameters can leave a token out."""
        return params.typical_p < 1

    def edit_of(self, samples: Ints, rows: Rows, positions: Positions) -> "MostTypical":
        """Return the edit that keeps typical tokens."""
        return MostTypical(samples, *(self.numbers[name][rows] for name in ("typical_p", "top_k")))


class MostTypical(NamedTuple):
    """An edit that sets all logits to -inf but those of the most typical tokens among the top_k likeliest."""

    row: Ints  # [n] index of the sample
    typical_p: Floats  # [n] in [0, 1)
    top_k: Ints  # [n], see Filters

    def apply(self, logits: Logits) -> None:
        """Set these logits to -inf, in place. Each row is computed by itself, so its bits depend on it alone."""
        for place, index in enumerate(self.row.tolist()):
            one = np.array([index])
            values = logits[one]
            ids = left_of_row(values[0], self.top_k[[place]], _ALL, _NONE)
            if len(ids):  # else the row fails: its largest logit is not finite
                kept = ids[most_typical(values[0, ids], float(self.typical_p[place]))]
                left = np.full_like(values, -np.inf)
                left[0, kept] = values[0, kept]
                logits[one] = left

    def moves(self, largest: Int32s) -> Ints:
        """Return the samples that the edit changes: the likeliest token may not be typical."""
        return self.row

    def only(self, wanted: Bools) -> "MostTypical":
        """Return the part of the wanted samples."""
        kept = wanted[self.row]
        return MostTypical(self.row[kept], self.typical_p[kept], self.top_k[kept])


def most_typical(logits: Floats, typical_p: float) -> Ints:
    """Return the indices of the fewest typical tokens that are likelier than typical_p together, at least one.

    logits [n]: finite; of equally typical tokens the first ones come first. No more tokens are sorted than it takes.
    """
    below: Doubles = logits.max().astype(np.float64) - logits.astype(np.float64)
    weights = np.exp(-below)
    total = weights.sum()
    distance = np.abs(below - (weights * below).sum() / total)  # log(total), in surprise and entropy, cancels out
    for size in (*(size for size in BUCKETS if size < len(logits)), len(logits)):
        near = np.sort(np.argpartition(distance, size - 1)[:size])
        near = near[np.argsort(distance[near], kind="stable")]
        count = int(np.searchsorted(np.cumsum(weights[near]), typical_p * total, side="right")) + 1
        # Behind the last of a bucket there may be others at the same distance.
        if size == len(logits) or (count < size and distance[near[count - 1]] < distance[near[-1]]):
            break
    return near[:count]
