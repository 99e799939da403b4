"""SwapSpace: the blocks of the host pool to which preempted requests are copied."""

import numpy as np

from ipc.tables.arrays import Int32s


class SwapSpace:
    """The slots of the host pool.

    A plan copies to the host before it copies back, so a slot that it reads can only be allocated again in the next
    plan.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)  # a stack; its top is at the end
        self._num_free = num_slots
        self._read: list[Int32s] = []  # slots that the plan being made reads

    @property
    def num_free(self) -> int:
        """Return the number of free slots."""
        return self._num_free

    def take(self, count: int) -> Int32s:
        """Allocate slots int32 [count]. The caller has compared count with num_free."""
        assert count <= self._num_free, f"{count} swap slots requested, {self._num_free} free"
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def give_back(self, slots: Int32s) -> None:
        """Free the slots of a request that has ended. No plan reads them."""
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)

    def give_back_after_plan(self, slots: Int32s) -> None:
        """Free these slots at the end of the plan being made, which copies from them."""
        self._read.append(slots)

    def end_plan(self) -> None:
        """Free the slots that the finished plan reads."""
        for slots in self._read:
            self.give_back(slots)
        self._read.clear()

    def check_integrity(self, held: list[Int32s]) -> None:
        """Check that no slot is lost or held twice. Errors: AssertionError with the numbers. held: each swapped
        request's slots.
        """
        every = np.concatenate([*held, *self._read, self._free[: self._num_free]])
        assert sorted(every.tolist()) == list(range(self.num_slots)), f"{self.num_slots} swap slots, found {every}"
