"""Drafter: the interface of a source of drafts in the executor that computes them with a model."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from core.execution.plan import SchedulerOutput
from core.execution.runner_table import RunnerTable
from core.models.operations.tensor import Tensor
from core.sampling.columns import SamplingColumns
from ipc.tables.arrays import Bools, Int32s, Ints


class StepStates(NamedTuple):
    """The tokens of a step of R rows, and the hidden states that the model gave for them."""

    rows: Ints  # [R]
    num_tokens: Ints  # [R] including drafts
    context_lens: Ints  # [R] including drafts
    slots: Ints  # [T] of each token, row after row
    #: Returns what Llama.tap() keeps of the tokens with these indices [n]: [n, taps, width] or [n, taps * width]
    #: float32, where the model computes.
    of_tokens: Callable[[Ints], Tensor]


class RanStep(NamedTuple):
    """A step of the model whose sampled tokens are in the table."""

    plan: SchedulerOutput
    states: StepStates | None = None  # None: nothing taps the model


class Drafter(Protocol):
    """A source of drafts that runs a model."""

    def apply(self, plan: SchedulerOutput) -> None:
        """Handle which blocks have new contents, and which rows start. Called before the step."""

    def propose(self, step: RanStep, table: RunnerTable, sampling: SamplingColumns) -> tuple[Int32s, Int32s]:
        """Return (counts [R], token ids, row after row) of drafts for the rows that have sampled in this step."""

    def step(self, rows: Ints, table: RunnerTable, sampling: SamplingColumns) -> None:
        """Run one round of single-token drafts with meaningless contents, to measure it."""


def kept_tokens(inputs: StepStates, table: RunnerTable, limit: int) -> tuple[Ints, Ints, Bools]:
    """Return (starts, counts, drafts), each [R]: which tokens of a step have a next one, and which rows get drafts.

    starts: position of a row's first token in the step. counts: how many of its tokens there are before another known
    one, at positions below `limit`. drafts: whether the last of these is the row's second-to-last token, and the row
    has sampled: drafts can follow it.
    """
    rows = inputs.rows
    starts = inputs.context_lens - inputs.num_tokens
    known = table.num_tokens[rows]
    ends = np.minimum(np.minimum(inputs.context_lens, known - 1), limit)
    counts = np.maximum(ends - starts, 0)
    drafts = (ends == known - 1) & (counts > 0) & (table.num_computed_tokens[rows] == known - 1)
    return starts, counts, drafts


def merged(first_counts: Int32s, first: Int32s, second_counts: Int32s, second: Int32s) -> tuple[Int32s, Int32s]:
    """Return (counts [R], token ids) of the first source's drafts; for rows where it has none, the second's."""
    takes = (first_counts == 0) & (second_counts > 0)
    counts = np.where(takes, second_counts, first_counts)
    token_ids = np.empty(int(counts.sum()), np.int32)
    from_second = takes.repeat(counts)
    token_ids[~from_second] = first
    token_ids[from_second] = second[takes.repeat(second_counts)]
    return counts.astype(np.int32), token_ids
