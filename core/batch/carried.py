"""Carried: changes since the last plan that ran, which the next plan that runs carries to the runner."""

from typing import NamedTuple

import numpy as np

from ipc.tables.arrays import NO_INT32S, AnyInts, Int32s


class Copies(NamedTuple):
    """Blocks or states to copy: sources[i] to targets[i]."""

    sources: list[Int32s]
    targets: list[Int32s]

    def add(self, source: int, target: int) -> None:
        """Add the copy of one block or state."""
        self.sources.append(np.array([source], np.int32))
        self.targets.append(np.array([target], np.int32))

    def drop(self, targets: Int32s) -> None:
        """Remove the copies to these targets, which are no longer needed. targets: the same array that add() got."""
        for index, blocks in enumerate(self.targets):
            if blocks is targets:
                del self.sources[index], self.targets[index]
                return

    def drop_into(self, blocks: AnyInts) -> None:
        """Remove the copies into any of these blocks."""
        kept = [index for index, targets in enumerate(self.targets) if not np.isin(targets, blocks).any()]
        self.sources[:] = [self.sources[index] for index in kept]
        self.targets[:] = [self.targets[index] for index in kept]

    def columns(self) -> tuple[Int32s, Int32s]:
        """Return sources [n] and targets [n] of all copies, in the order in which they were added."""
        if not self.sources:
            return NO_INT32S, NO_INT32S
        return np.concatenate(self.sources), np.concatenate(self.targets)


class CarriedColumns(NamedTuple):
    """What a plan carries, as the columns of SchedulerOutput."""

    removed_rows: Int32s = NO_INT32S
    swapped_out_blocks: Int32s = NO_INT32S
    swapped_out_slots: Int32s = NO_INT32S
    swapped_in_slots: Int32s = NO_INT32S
    swapped_in_blocks: Int32s = NO_INT32S
    copied_blocks: Int32s = NO_INT32S
    copied_to: Int32s = NO_INT32S
    copied_states: Int32s = NO_INT32S
    copied_states_to: Int32s = NO_INT32S


#: Usually there is nothing to carry.
NOTHING_CARRIED = CarriedColumns()


class Carried:
    """Rows removed and blocks to copy since the last plan that ran. An empty plan does not run and carries nothing."""

    def __init__(self) -> None:
        self.removed_rows: list[int] = []
        self.renewed_rows: dict[int, None] = {}  # rows that are sent to the runner again, as they are now
        self.out = Copies([], [])  # from the cache to the host
        self.within = Copies([], [])  # within the cache
        self.back = Copies([], [])  # from the host to the cache
        self.states = Copies([], [])  # recurrent states, one after the other

    def forget_copies(self) -> None:
        """Drop all copies, because the blocks and states that they read have lost their content."""
        self.out, self.within, self.back, self.states = (Copies([], []) for _ in range(4))

    def take(self) -> CarriedColumns:
        """Return everything as columns, and carry nothing. The renewed rows are among the plan's added ones."""
        removed = NO_INT32S
        if self.removed_rows:
            removed = np.array(self.removed_rows, np.int32)
            self.removed_rows.clear()
        if not (self.out.sources or self.within.sources or self.back.sources or self.states.sources):
            return CarriedColumns(removed) if len(removed) else NOTHING_CARRIED
        out, back, within = self.out.columns(), self.back.columns(), self.within.columns()
        columns = CarriedColumns(removed, *out, *back, *within, *self.states.columns())
        self.forget_copies()
        return columns
