"""Xtc: the options xtc_probability and xtc_threshold ("exclude top choices"), as in llama.cpp.

With this probability, a token is drawn without the top choices: the tokens whose probability is at least xtc_threshold,
except the least likely of them. So it only happens if there are two or more, and a good token is always left.

The order is llama.cpp's: the probabilities are those of the tokens that top_k, top_p and min_p keep, at temperature 1,
and the temperature follows. Whether it happens is decided by a Philox number from the request's seed and the token's
position. So it does not depend on the batch, and is the same if the request is resumed or replayed.
"""

from typing import NamedTuple

import numpy as np

from core.sampling.edit_group import Logits
from core.sampling.filters import Filters, left_of_row
from core.sampling.number_options import NumberOptions
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import Bools, Floats, Int32s, Ints, Positions, Rows
from kernels.gumbel import philox4x32

#: The purpose of the Philox numbers; kernels/gumbel.py has others.
XTC = 3
#: Two tokens cannot both be likelier than this.
_MOST = 0.5


class Xtc(NumberOptions):
    """The rows with xtc_probability."""

    options = ("xtc_probability",)
    reads = ("xtc_threshold", "temperature", "top_k", "top_p", "min_p")
    applies_filters = True

    def is_enabled(self, params: SamplingParams) -> bool:
        """Return whether these parameters can exclude a token."""
        return params.xtc_probability > 0 and params.xtc_threshold <= _MOST

    def edit_of(self, samples: Ints, rows: Rows, positions: Positions) -> "Excluded | None":
        """Return the edit for the samples whose number is below their probability, or None if there are none."""
        happens = self._happens(rows, positions)
        samples, rows = samples[happens], rows[happens]
        if not len(samples):
            return None
        return Excluded(samples, *(self.numbers[name][rows] for name in self.reads))

    def filtered(self, rows: Rows, positions: Positions) -> Ints:
        """Return the samples to which the edit applies top_k, top_p and min_p."""
        samples = self.using(rows)
        return samples[self._happens(rows[samples], positions[samples])]

    def _happens(self, rows: Rows, positions: Positions) -> Bools:
        counter = np.zeros((len(rows), 4), np.uint32)
        counter[:, 0], counter[:, 1], counter[:, 2] = positions, self.choice[rows], XTC
        numbers = philox4x32(self.seed[rows], counter)[:, 0] * 2.0**-32  # float64 in [0, 1)
        happens: Bools = numbers < self.numbers["xtc_probability"][rows]
        return happens


class Excluded(NamedTuple):
    """An edit that excludes the top choices of its rows, and what their filters exclude."""

    row: Ints  # [n] index of the sample
    threshold: Floats  # [n] minimum probability of a top choice
    temperature: Floats  # [n] for the filters; 0 = 1
    top_k: Ints  # [n], see Filters
    top_p: Floats  # [n]
    min_p: Floats  # [n]

    def apply(self, logits: Logits) -> None:
        """Set the logits of excluded tokens to -inf, in place. Each row is computed separately."""
        filters = Filters(self.top_k, self.top_p, self.min_p)
        is_filtered = filters.have_effect(logits.shape[1])
        for place, index in enumerate(self.row.tolist()):
            one = np.array([index])
            values = logits[one]
            row = values[0]
            if is_filtered[place]:
                scaled = row / (self.temperature[place] or np.float32(1))
                ids = left_of_row(scaled, *filters.of(np.array([place])))
                kept = row[ids]
                row[:] = -np.inf
                row[ids] = kept
                row[ids[top_choices(kept, self.threshold[place])]] = -np.inf
            else:
                row[top_choices(row, self.threshold[place])] = -np.inf
            logits[one] = values

    def moves(self, largest: Int32s) -> Ints:
        """Return the samples that the edit changes."""
        return self.row

    def only(self, wanted: Bools) -> "Excluded":
        """Return the part for the wanted samples."""
        kept = wanted[self.row]
        return Excluded(
            self.row[kept],
            self.threshold[kept],
            self.temperature[kept],
            self.top_k[kept],
            self.top_p[kept],
            self.min_p[kept],
        )


def top_choices(logits: Floats, threshold: np.float32) -> Ints:
    """Return the indices of all tokens with at least this probability, except the least likely of them.

    logits [n]: -inf = no choice; equal ones ascend by id. Among equally likely tokens the last one counts as the least
    likely.
    """
    weights = np.exp((logits - logits.max(initial=-np.inf)).astype(np.float64))
    likely = np.flatnonzero((weights > 0) & (weights >= threshold * weights.sum()))
    return likely[np.argsort(-logits[likely], kind="stable")[:-1]]
