"""StepColumns: the tokens and samples of a step on a device, as columns in host memory, made from its plan."""

from typing import NamedTuple

import numpy as np

from core.execution.plan import SchedulerOutput
from core.runner.step_inputs import draft_samples
from ipc.tables.arrays import AnyInts, Int32s, Ints, Rows
from kernels.triton.attention_work import SPLIT, shared_tokens


class StepColumns(NamedTuple):
    """A step's T tokens of R rows, packed row after row, with S samples."""

    num_tokens: Int32s  # [R] including drafts
    context_lens: Ints  # [R] tokens in the cache after the step, including drafts
    rows: Rows  # [T] table row of each token
    positions: Ints  # [T]
    #: [S] index in the plan's rows of each sample's row, and index of the token whose logits it needs. A row with
    #: drafts has several adjacent samples: after its known tokens and after each of its drafts.
    in_plan: Ints
    logits_tokens: AnyInts
    #: Tokens, and tokens in the cache after them, of each piece for attention: a row, or a token of a row with drafts.
    pieces: tuple[AnyInts, AnyInts]
    offsets: Ints | None = None  # [S] drafts before each sample: 0, 1, ... in a row; None: no row has drafts
    #: Pieces of one token that follow one another in a row and read its context together: the column TritonWork.shared.
    #: Empty: each reads its own.
    shared: tuple[Int32s, ...] = ()
    #: Leading splits that all pieces of one token have in common: the column TritonWork.common. Empty: none.
    common: tuple[Int32s, ...] = ()
    lasts: tuple[Int32s, ...] = ()  # the column TritonWork.lasts. Empty: no token sees a later one


def step_columns(rows: Rows, counts: Int32s, ends: Ints, in_plan: Ints) -> StepColumns:
    """Return the columns of a step without drafts.

    rows, counts, ends [R]: the plan's rows, their tokens, and their number of computed tokens after the step. in_plan:
    indices of the rows that sample.
    """
    last = np.cumsum(counts) - 1
    positions = np.arange(int(last[-1]) + 1) + np.repeat(ends - 1 - last, counts)
    return StepColumns(counts, ends, np.repeat(rows, counts), positions, in_plan, last[in_plan], (counts, ends))


def draft_columns(plan: SchedulerOutput, ends: Ints, in_plan: Ints, most_alone: int, group_size: int) -> StepColumns:
    """Return the columns of a step in which rows have drafts.

    ends [R]: computed tokens after the step, without drafts. Each token of a row with drafts is a piece for attention,
    like the token of a row without drafts. So it gets the same bits as alone, long contexts are split, and the CUDA
    graph for that number of tokens can be used. most_alone: the most such tokens; if there are more, the tokens of a
    row stay together. group_size: query heads per KV head.
    """
    num_drafts = plan.num_draft_tokens
    columns = step_columns(plan.rows, plan.num_scheduled_tokens, ends + num_drafts, in_plan)
    counts = columns.num_tokens.astype(np.int64)
    in_plan, offsets, logits_tokens = draft_samples(in_plan, num_drafts, counts.cumsum() - 1)
    columns = columns._replace(in_plan=in_plan, logits_tokens=logits_tokens, offsets=offsets)
    is_drafted = num_drafts > 0
    alone = counts[is_drafted | (counts == 1)]
    if int(alone.sum()) > most_alone:
        return columns
    lengths: Ints = np.where(is_drafted, 1, counts).repeat(np.where(is_drafted, counts, 1))
    pieces = lengths, columns.positions[lengths.cumsum() - 1] + 1
    return columns._replace(pieces=pieces, shared=(shared_tokens(alone, group_size),))


def common_splits(plan: SchedulerOutput, columns: StepColumns, block_size: int) -> tuple[Int32s, ...]:
    """Return the column of splits that several decoding rows of a step without drafts have in common, if there are any.

    Fork partners may have a last block in common that is not full, so a split counts if it is whole in each context.
    """
    contexts = columns.context_lens[columns.num_tokens == 1]
    if len(contexts) < 2:
        return ()
    count = min(plan.num_common_prefix_blocks * block_size, int(contexts.min()) - 1) // SPLIT
    return (np.array([count], np.int32),) if count else ()


def trial_columns(num_tokens: int, most_alone: int, group_size: int) -> StepColumns:
    """Return the columns of a step that verifies the first tokens of row 0. All but its first token are drafts."""
    rows, at, whole = np.zeros(num_tokens, np.int64), np.arange(num_tokens), np.array([num_tokens])
    if num_tokens > most_alone:
        return StepColumns(whole, whole, rows, at, rows, at, (whole, whole))
    shared = (shared_tokens(whole, group_size),) if num_tokens > 1 else ()
    return StepColumns(whole, whole, rows, at, rows, at, (np.ones(num_tokens, np.int64), at + 1), None, shared)


def first_tokens(columns: StepColumns) -> Ints:
    """Return the index [R + 1] of each row's first token, then the number of tokens."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(columns.num_tokens, dtype=np.int64)))
