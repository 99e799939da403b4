"""Rank: the place of a process in a group of processes that computes one model together."""

from typing import NamedTuple

from core.models.parts.shard import Shard
from kernels.cpu.group import SeparateMemory, SharedMemory


class Rank(NamedTuple):
    """A shard, and the buffers by which the ranks exchange what they compute."""

    shard: Shard
    memory: SharedMemory | SeparateMemory
