"""StructuredOutputs: the option structured_outputs, which forbids the tokens that a row's grammar does not allow."""

from typing import NamedTuple

import numpy as np

from core.execution.plan import NewRow
from core.grammars.matchers import RowMatchers
from core.sampling.edit_group import EditGroup, Logits, SampledRows
from ipc.tables.arrays import Bools, Int32s, Ints, Rows, TokenIds, UInt32s
from kernels.cpu.token_masks import CpuTokenMasks


class StructuredOutputs(EditGroup):
    """The rows with structured_outputs, each with the matcher of its grammar.

    kernel: the C kernel that applies masks; None: NumPy.
    """

    options = ("structured_outputs",)
    looks_ahead = False  # a matcher's position is after the row's tokens
    asks_first = True  # asks whether a token is allowed, because a mask takes ten times as long

    def __init__(self, matchers: RowMatchers, kernel: CpuTokenMasks | None = None) -> None:
        self._matchers, self._kernel = matchers, kernel

    def add(self, new: NewRow) -> bool:
        """Add the row if its parameters use the option; return whether they do."""
        params, output = new.params, new.token_ids[new.num_prompt_tokens :]
        if params.structured_outputs is None:
            return False
        self._matchers.add(new.row, params.structured_outputs, output, takes_drafts=not params.use_beam_search)
        return True

    def remove(self, row: int) -> None:
        """Remove the row and its matcher, if it has one."""
        self._matchers.remove(row)

    def append(self, rows: Rows, token_ids: TokenIds, *, is_distinct: bool = True) -> None:
        """Advance the matchers of these rows by their tokens."""
        if len(self._matchers):
            self._matchers.append(rows, token_ids)

    def take(self, rows: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
        """Advance the matchers of these rows by the tokens that they allow. Return the indices of the other rows."""
        return self._matchers.take(rows, tokens)

    def failure(self, row: int) -> str | None:
        """Return why the row has no token that it may sample, or None for a row without the option."""
        return self._matchers.failure(row)

    def edit(self, sampled: SampledRows) -> "Masked | None":
        """Return the edit that forbids tokens, or None if no sampled row needs it."""
        if not len(self._matchers):
            return None
        samples = sampled.samples
        is_mine = self._matchers.is_constrained[samples.rows]
        mine = np.flatnonzero(is_mine if sampled.is_settled is None else is_mine & ~sampled.is_settled)
        if not len(mine):
            return None
        rows = samples.rows[mine]
        if samples.offsets is None:
            return Masked(mine, self._matchers.masks(rows), self._kernel)
        begins = np.flatnonzero(samples.offsets[mine] == 0)
        ends = np.append(begins[1:], len(mine)) - begins - 1  # drafts of each row
        table = sampled.table
        drafts = [
            table.tokens.read(row, length, length + count).tolist()
            for row, length, count in zip(
                rows[begins].tolist(), table.num_tokens[rows[begins]].tolist(), ends.tolist(), strict=True
            )
        ]
        return Masked(mine, self._matchers.masks(rows[begins], drafts), self._kernel)


class Masked(NamedTuple):
    """An edit that sets all logits of its rows to -inf, except those of the allowed tokens."""

    row: Ints  # [n] index of the sample
    mask: UInt32s  # [n, words]: bit i of word w allows token 32 * w + i; tokens beyond the words are not allowed
    kernel: CpuTokenMasks | None = None

    def apply(self, logits: Logits) -> None:
        """Set the logits [S, V] of all other tokens of these rows to -inf, in place."""
        if self.kernel is not None:
            assert isinstance(logits, np.ndarray), type(logits)
            self.kernel(logits, self.row, self.mask)
            return
        size = logits.shape[1]
        bits = np.unpackbits(self.mask.view(np.uint8), axis=1, count=size, bitorder="little")
        logits[self.row] = np.where(bits == 0, np.float32(-np.inf), logits[self.row])

    def moves(self, largest: Int32s) -> Ints:
        """Return the samples whose largest logit is forbidden."""
        token = largest[self.row].astype(np.int64)
        word = np.minimum(token >> 5, self.mask.shape[1] - 1)
        is_allowed = (self.mask[np.arange(len(word)), word] >> (token & 31).astype(np.uint32)) & 1
        moved: Ints = self.row[(is_allowed == 0) | (token >> 5 != word)]
        return moved

    def only(self, wanted: Bools) -> "Masked":
        """Return the part for the wanted samples."""
        kept = wanted[self.row]
        return Masked(self.row[kept], self.mask[kept], self.kernel)
