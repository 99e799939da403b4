"""Carried: changes since the last plan that ran, which the next one that runs carries to the runner."""

from typing import NamedTuple

import numpy as np

from ipc.arrays import NO_INT32S, Int32s


class Copies(NamedTuple):
    """Blocks to copy: sources[i] to targets[i]."""

    sources: list[Int32s]
    targets: list[Int32s]

    def drop(self, targets: Int32s) -> None:
        """Remove the copies to these targets, which are no longer needed. targets: the array that was noted."""
        for index, blocks in enumerate(self.targets):
            if blocks is targets:
                del self.sources[index], self.targets[index]
                return

    def columns(self) -> tuple[Int32s, Int32s]:
        """Return sources [n] and targets [n] of all copies, in the order in which they were noted."""
        if not self.sources:
            return NO_INT32S, NO_INT32S
        return np.concatenate(self.sources), np.concatenate(self.targets)


class Carried:
    """Rows removed and blocks to copy since the last plan that ran. An empty plan does not run and carries nothing."""

    def __init__(self) -> None:
        self.removed_rows: list[int] = []
        self.out = Copies([], [])
        self.back = Copies([], [])
