"""The decision record: which requests the last step ran, preempted or left waiting, and why. It keeps no copies."""

from enum import IntEnum
from typing import NamedTuple

import msgspec

from core.batch.request import Request
from ipc.tables.arrays import Ints, Rows


class Verdict(IntEnum):
    """Why a waiting request was examined and did not start.

    Verdicts below HOLDS_THE_REST hold the requests behind this one. Others let them pass, because they may not lack the
    same thing.
    """

    NO_ROW = 1  # max_num_seqs requests are running
    NO_BUDGET = 2  # too few tokens are left in the step
    PREEMPTED = 3  # it was preempted in this step
    FENCED = 4  # rows were preempted for it; their blocks are freed when the steps in flight are done
    HOLDS_THE_REST = 15
    NO_BLOCKS = 16  # the KV cache has no room for its tokens
    PARTIAL_PREFILLS = 17  # max_num_partial_prefills prompts are being computed in chunks
    NO_ADAPTER = 18  # running requests use max_loras other adapters
    NO_ENCODER_BUDGET = 19  # the step has no room for its image: in the encoder's budget, or in the encoder cache


class Cause(IntEnum):
    """The cause of a preemption."""

    OLDER = 1  # a running request that is served earlier needed blocks
    MORE_URGENT = 2  # a waiting request took its place


class Examined(NamedTuple):
    """A waiting request that did not start, and what it lacked."""

    request: Request
    verdict: Verdict
    needed: int  # in the verdict's unit: rows, tokens (also of an image), blocks or prompts
    available: int


class Preempted(NamedTuple):
    """A request that lost its row to another request."""

    request: Request
    cause: Cause
    num_computed_tokens: int
    num_swapped_blocks: int  # 0: its tokens are computed again


class Decision(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The decisions of one step.

    rows, counts [R]: the rows that run and their tokens. The last `num_started` of them start or resume in this step.
    """

    step: int
    now_ns: int
    rows: Rows
    counts: Ints
    num_started: int
    num_skipped: int  # running rows that wanted tokens and got none
    preempted: list[Preempted]
    examined: list[Examined]  # waiting requests that did not start, in order
    num_waiting: int  # all waiting requests, after the step
    budget: int  # tokens left over
    num_free_blocks: int
