"""Rank: a process's place in a group of processes that computes one model together."""

from typing import NamedTuple

from core.models.parts.shard import Shard
from kernels.cpu.group import SeparateMemory, SharedMemory


class Rank(NamedTuple):
    """A shard, and the buffers through which the ranks exchange results."""

    shard: Shard
    memory: SharedMemory | SeparateMemory
