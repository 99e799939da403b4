"""SwapSpace: the blocks of the host pool to which preempted requests are copied."""

import numpy as np

from ipc.arrays import Int32s


class SwapSpace:
    """A plan copies out before it copies in, so what it reads from is given away again only in the next plan."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)  # a stack: the top is the end
        self._num_free = num_slots
        self._read: list[Int32s] = []  # by the plan being made

    @property
    def num_free(self) -> int:
        """Slots that hold no copy of a block."""
        return self._num_free

    def take(self, count: int) -> Int32s:
        """The caller has compared count with num_free."""
        assert count <= self._num_free, f"{count} swap slots asked of {self._num_free} free"
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def give_back(self, slots: Int32s) -> None:
        """Nobody reads them: the request that they belong to has ended."""
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)

    def give_back_after_plan(self, slots: Int32s) -> None:
        """The plan being made copies from them."""
        self._read.append(slots)

    def end_plan(self) -> None:
        """Free the slots that the plan reads; the next plan may write to them."""
        for slots in self._read:
            self.give_back(slots)
        self._read.clear()

    def check_integrity(self, held: list[Int32s]) -> None:
        """held: the slots of each swapped request. AssertionError with the numbers."""
        every = np.concatenate([*held, *self._read, self._free[: self._num_free]])
        assert sorted(every.tolist()) == list(range(self.num_slots)), f"{self.num_slots} swap slots, found {every}"
