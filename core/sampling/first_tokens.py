"""Draws tokens from unedited logits first, and then checks whether the row may have them.

If an option only forbids tokens and is slow to say which, it is first asked about one token: that of the unedited
logits. A draw takes the largest of logit / temperature + noise (kernels/gumbel.py). So forbidding other tokens does not
change it, unless a filter (top_k, top_p, min_p) is used. If that token is forbidden, the option is asked about the next
largest, and only then for all allowed tokens.
"""

from typing import NamedTuple

import numpy as np

from core.execution.runner_table import RunnerTable
from core.sampling.columns import SamplingColumns, positions_of
from core.sampling.sampler import NO_EDITS, SamplingInputs, sample
from ipc.tables.arrays import Floats, Int32s, Ints, Rows
from kernels.cpu.sampling import CpuSampler

#: Up to one sample in this many is drawn from a copy of its logits: 0.2 MB each, whereas a call for all takes 0.1 ms.
_FEW = 4
#: Tokens of a draw to try when the first is refused. Of 189 such draws in a JSON string, at temperature 1, the second
#: was allowed in 166 and the third in 17.
_MORE = 2


def sample_rows(
    columns: SamplingColumns,
    table: RunnerTable,
    rows: Rows,
    logits: Floats,
    largest: Int32s | None,
    kernel: CpuSampler | None,
    offsets: Ints | None = None,
    *,
    keeps_logits: bool,
) -> Int32s:
    """Return the next token [S] of each of these rows, like sample(). The logits [S, V] are overwritten.

    offsets [S]: see SamplingColumns.inputs().
    """
    if columns.num_asking and largest is not None and kernel is not None:
        tokens = largest.copy()  # the model's next step overwrites its result
        inputs: SamplingInputs | None = None
        if columns.num_drawing:
            inputs = columns.parameters(rows, positions_of(rows, table, offsets))
            if not columns.all_ask:  # tokens of rows that are edited in any case are not drawn yet
                inputs.temperature[columns.is_edited(rows)] = 0
            tokens = kernel(logits, inputs[:-1], largest)
        refused, closed = columns.take(rows, tokens, offsets)
        if not refused and not closed:
            return tokens
        left = _Left(columns, table, rows, offsets, logits, largest, kernel, tokens)
        return left.sample(refused, closed, inputs, keeps_logits=keeps_logits)
    positions = positions_of(rows, table, offsets)
    edits = columns.edits(rows, table, positions, offsets) if columns.num_edited else NO_EDITS
    return sample(logits, columns.parameters(rows, positions, edits), kernel, largest, keeps_logits=keeps_logits)


class _Left(NamedTuple):
    """The samples of a step, some of which may not get their tokens: the arguments of sample_rows(), and the tokens."""

    columns: SamplingColumns
    table: RunnerTable
    rows: Rows
    offsets: Ints | None
    logits: Floats
    largest: Int32s
    kernel: CpuSampler
    tokens: Int32s  # [S] from the unedited logits

    def sample(
        self, refused: list[int], closed: list[int], inputs: SamplingInputs | None, *, keeps_logits: bool
    ) -> Int32s:
        """Return the tokens, with new ones for samples that are refused or closed.

        inputs: what the tokens were drawn with, if any were.
        """
        few = 0 if keeps_logits else len(self.tokens) // _FEW
        if refused and len(refused) + len(closed) <= few:
            inputs = inputs or self.columns.parameters(self.rows, positions_of(self.rows, self.table, self.offsets))
            refused = [index for index in refused if not self._takes_next(index, inputs)]
        if not refused and not closed:
            return self.tokens
        which = np.array(sorted(refused + closed), np.int64)
        if len(which) > few:
            return self._sample_all(which, keeps_logits=keeps_logits)
        rows, offsets = self.rows[which], None if self.offsets is None else self.offsets[which]
        positions = positions_of(rows, self.table, offsets)
        edits = self.columns.edits(rows, self.table, positions, offsets)
        part = self.logits[which] if len(which) > 1 else self.logits[which[0] : which[0] + 1]
        # Drawing from these logits takes less time than finding out whether the edits keep the largest.
        self.tokens[which] = sample(part, self.columns.parameters(rows, positions, edits), self.kernel)
        return self.tokens

    def _takes_next(self, index: int, inputs: SamplingInputs) -> bool:
        """Give a sample the next token of its draw, because its token is refused. Return whether it got one.

        The winner among the remaining tokens is also the winner among the allowed ones, if it is allowed. Edits also
        forbid what is refused.
        """
        one, tokens = slice(index, index + 1), self.tokens
        logits, own = self.logits[one], tuple([column[one] for column in inputs[:-1]])
        for _ in range(_MORE):
            logits[0, tokens[index]] = -np.inf
            tokens[one] = self.kernel(logits, own)
            refused, closed = self.columns.take(self.rows[one], tokens[one])
            if not refused:
                return not closed
        return False

    def _sample_all(self, which: Ints, *, keeps_logits: bool) -> Int32s:
        """Return the tokens [S] except those of samples `which` [n], in one call for all. Edits change the logits."""
        is_settled = np.ones(len(self.tokens), np.bool_)
        is_settled[which] = False
        positions = positions_of(self.rows, self.table, self.offsets)
        edits = self.columns.edits(self.rows, self.table, positions, self.offsets, is_settled)
        inputs = self.columns.parameters(self.rows, positions, edits)
        inputs.temperature[is_settled & (self.tokens >= 0)] = 0  # the parameters are copies
        largest = np.where(is_settled, self.tokens, self.largest)
        return sample(self.logits, inputs, self.kernel, largest, keeps_logits=keeps_logits)
