"""Twelve bugs for the scheduler, each as a patch: what `replay shrink` is tried on."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from core.batch.batch import Batch
from core.batch.request import Request
from core.batch.stop_check import StopCheck
from core.kv.block_names import BlockNames
from core.kv.block_pool import BlockPool
from core.scheduling.admission import Admission
from core.scheduling.ends import Ends
from core.scheduling.preemption import Preemption
from core.scheduling.waiting_queue import WaitingQueue

Patch = pytest.MonkeyPatch
ANY = "crashed or broken or stuck or misread"
SWAP = {"preemption_mode": "swap", "num_swap_blocks": 12, "num_blocks_override": 18}


def fences_are_never_lifted(patch: Patch) -> None:
    patch.setattr(BlockPool, "lift_fences", lambda pool, step: None)


def growth_is_rounded_down(patch: Patch) -> None:
    """A row gets the block of its next token a step late."""

    def late(batch: Batch, rows: Any, ends: Any) -> Any:
        return np.maximum(ends // batch.block_size - batch.table.num_blocks[rows], 0)

    patch.setattr(Batch, "lacking", late)


def a_preempted_request_is_forgotten(patch: Patch) -> None:
    push = WaitingQueue.push

    def lose(queue: WaitingQueue, request: Request) -> None:
        if request.num_preemptions < 2:
            push(queue, request)

    patch.setattr(WaitingQueue, "push", lose)


def a_block_is_leaked(patch: Patch) -> None:
    free = BlockPool.free

    def leak(pool: BlockPool, blocks: Any, fence: int | None) -> None:
        free(pool, blocks[1:] if len(blocks) > 5 else blocks, fence)

    patch.setattr(BlockPool, "free", leak)


def a_shared_block_is_not_counted(patch: Patch) -> None:
    hold = BlockPool.hold

    def forget(pool: BlockPool, blocks: Any) -> None:
        shared = blocks[pool.ref_count[blocks] > 0]
        hold(pool, blocks)
        pool.ref_count[shared] -= 1

    patch.setattr(BlockPool, "hold", forget)


def a_block_is_given_out_twice(patch: Patch) -> None:
    allocate = BlockPool.allocate

    def repeat(pool: BlockPool, count: int) -> Any:
        blocks = allocate(pool, count)
        if count > 4:
            blocks[-1] = blocks[0]
        return blocks

    patch.setattr(BlockPool, "allocate", repeat)


def an_evicted_block_is_still_found(patch: Patch) -> None:
    forget = BlockNames.forget

    def keep_some(names: BlockNames, blocks: Any) -> None:
        forget(names, blocks[blocks % 3 != 1])

    patch.setattr(BlockNames, "forget", keep_some)


def a_copy_is_counted_too_long(patch: Patch) -> None:
    """The host's copy of a preempted request is said to have a token that it has not."""
    swap_out = Preemption._swap_out

    def exaggerate(preemption: Preemption, row: int) -> Any:
        swapped = swap_out(preemption, row)
        return None if swapped is None else swapped._replace(num_computed_tokens=swapped.num_computed_tokens + 1)

    patch.setattr(Preemption, "_swap_out", exaggerate)


def the_first_block_is_not_copied_back(patch: Patch) -> None:
    swap_in = Preemption.swap_in
    patch.setattr(
        Preemption,
        "swap_in",
        lambda self, request, block_ids, num_hits: swap_in(self, request, block_ids, max(1, num_hits)),
    )


def a_length_is_not_seen(patch: Patch) -> None:
    """A request goes on behind max_tokens where its last token fills a block."""
    check = StopCheck.__call__

    def overlook(self: StopCheck, rows: Any, tokens: Any, lengths: Any) -> Any:
        finishes, ended = check(self, rows, tokens, lengths)
        missed = lengths % 16 == 0
        return np.where(missed, 0, finishes).astype(finishes.dtype), ended & ~missed

    patch.setattr(StopCheck, "__call__", overlook)


def admission_counts_blocks_twice(patch: Patch) -> None:
    left = Admission._blocks_left
    patch.setattr(Admission, "_blocks_left", lambda self, start, room: left(self, start, room) + 2)


def an_end_stays_in_the_index(patch: Patch) -> None:
    """A request that ends beside another one in the same step is not forgotten."""
    forget = Ends._forget
    patch.setattr(Ends, "_forget", lambda self, requests: forget(self, requests[:1]))


class Bug(NamedTuple):
    """A patch, the options under which it shows, and the condition by which it is seen."""

    plant: Callable[[Patch], None]
    options: Mapping[str, Any] = MappingProxyType({})
    condition: str = ANY


BUGS = [
    Bug(fences_are_never_lifted, {"async_scheduling": True}),
    Bug(growth_is_rounded_down),
    Bug(a_preempted_request_is_forgotten),
    Bug(a_block_is_leaked),
    Bug(a_shared_block_is_not_counted),
    Bug(a_block_is_given_out_twice),
    Bug(an_evicted_block_is_still_found),
    Bug(a_copy_is_counted_too_long, SWAP),
    Bug(the_first_block_is_not_copied_back, SWAP),
    Bug(a_length_is_not_seen),
    Bug(admission_counts_blocks_twice),
    Bug(an_end_stays_in_the_index),
]
