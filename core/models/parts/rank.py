"""Rank: a process's place in a group of processes that computes one model together."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from core.models.operations.tensor import Tensor
from core.models.parts.shard import Shard
from kernels.cpu.group import SeparateMemory, SharedMemory


class GathersParts(Protocol):
    """What operations that run one by one exchange with other ranks.

    With a device of its own: kernels/torch/group.py; on a CPU: HostGroup of kernels/cpu/group.py.
    """

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the columns of all ranks [T, sum(widths)]. part [T, own width]: this rank's."""

    def join_rows(self, rows: Tensor, elsewhere: Tensor) -> Tensor:
        """Return rows [T, d] float32 of which each is one rank's. elsewhere [T]: which are not this one's."""


class Rank(NamedTuple):
    """A shard, and the buffers through which the ranks exchange results; with devices, what gathers them."""

    shard: Shard
    memory: SharedMemory | SeparateMemory | GathersParts
