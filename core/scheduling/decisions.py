"""The decision record: what the last step did with whom, and why not with others. Columns and references, no copies."""

from enum import IntEnum
from typing import NamedTuple

import msgspec

from core.batch.request import Request
from ipc.arrays import Ints, Rows


class Verdict(IntEnum):
    """On a waiting request that was looked at and did not start. What it lacks others behind it may not lack: those
    above HOLDS_THE_REST let them pass."""

    NO_ROW = 1  # max_num_seqs requests run
    NO_BUDGET = 2  # the step's tokens are given away
    PREEMPTED = 3  # in this very step
    FENCED = 4  # its room is made, and free when the steps in flight are done
    HOLDS_THE_REST = 15
    NO_BLOCKS = 16  # the KV cache has no room for its tokens
    PARTIAL_PREFILLS = 17  # max_num_partial_prefills prompts are being computed in chunks


class Cause(IntEnum):
    """Of a preemption."""

    OLDER = 1  # a running request, served before it, needed blocks
    MORE_URGENT = 2  # a waiting request took its place


class Examined(NamedTuple):
    request: Request
    verdict: Verdict
    needed: int  # blocks; of NO_BUDGET tokens
    available: int


class Preempted(NamedTuple):
    request: Request
    cause: Cause
    num_computed_tokens: int
    num_swapped_blocks: int  # 0: its tokens are computed again


class Decision(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Of one step. rows, counts: who runs, with how many tokens (the last `num_started` began or resumed in it)."""

    step: int
    now_ns: int
    rows: Rows
    counts: Ints
    num_started: int
    num_skipped: int  # running rows that wanted tokens and got none
    preempted: list[Preempted]
    examined: list[Examined]  # waiting ones that did not start, in order; the first holds the rest
    num_waiting: int  # in all, after the step
    budget: int  # tokens left over
    num_free_blocks: int
