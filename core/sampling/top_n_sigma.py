"""TopNSigma: the option top_n_sigma, which keeps the tokens whose logits are close to the largest.

A token is kept if its logit is at most top_n_sigma standard deviations below the largest (Tang et al. 2024,
arXiv 2411.07641). As in llama.cpp, the deviation is that of all logits but -inf, before the temperature.
"""

from typing import NamedTuple

import numpy as np

from core.sampling.edit_group import Logits
from core.sampling.number_options import NumberOptions
from ipc.tables.arrays import NO_INTS, Bools, Floats, Int32s, Ints, Positions, Rows


class TopNSigma(NumberOptions):
    """The rows with top_n_sigma."""

    options = ("top_n_sigma",)

    def edit_of(self, samples: Ints, rows: Rows, positions: Positions) -> "NearLargest":
        """Return the edit that keeps the tokens near the largest logit."""
        return NearLargest(samples, self.numbers["top_n_sigma"][rows])


class NearLargest(NamedTuple):
    """An edit that sets logits to -inf that are more than some standard deviations below the largest of their row."""

    row: Ints  # [n] index of the sample
    deviations: Floats  # [n] above 0

    def apply(self, logits: Logits) -> None:
        """Set these logits to -inf, in place. Each row is computed separately, so its bits depend only on itself."""
        for index, deviations in zip(self.row.tolist(), self.deviations.tolist(), strict=True):
            one = np.array([index])
            values = logits[one]
            known = values[values > -np.inf].astype(np.float64)
            if len(known):  # otherwise the row fails: a grammar may allow no token
                values[values < np.float32(known.max() - deviations * known.std())] = -np.inf
                logits[one] = values

    def moves(self, largest: Int32s) -> Ints:
        """Return no sample, because the largest logit stays."""
        return NO_INTS

    def only(self, wanted: Bools) -> "NearLargest":
        """Return the part for the wanted samples."""
        kept = wanted[self.row]
        return NearLargest(self.row[kept], self.deviations[kept])
