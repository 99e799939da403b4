"""Wires: what connects the workers of one executor, as descriptors that each inherits; and the places of the workers.

A worker is a rank of a stage. The ranks of a stage share memory, and the first of them has a channel to each other
one. Ranks of the same number in neighbouring stages have a channel between them.
"""

import fcntl
import os
import socket

import msgspec


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The place of a worker: a rank of `size`, in a stage of `num_stages`."""

    rank: int = 0
    size: int = 1
    stage: int = 0
    num_stages: int = 1

    @property
    def number(self) -> int:
        """Return the worker's number, stage after stage."""
        return self.stage * self.size + self.rank

    @property
    def count(self) -> int:
        """Return the number of workers."""
        return self.num_stages * self.size

    @property
    def is_last_stage(self) -> bool:
        """Return whether its stage samples."""
        return self.stage == self.num_stages - 1

    @property
    def answers(self) -> bool:
        """Return whether it is the one worker that answers steps."""
        return self.is_last_stage and self.rank == 0


class Wires(msgspec.Struct, array_like=True):
    """The descriptors of a worker. memory: -1 = its stage has one rank. before, after: -1 = there is no such stage.

    peers: of the first rank the channels to the others; of another the one to the first.
    """

    memory: int = -1
    peers: list[int] = []
    before: int = -1
    after: int = -1

    @property
    def descriptors(self) -> list[int]:
        """Return all that there are."""
        return [fd for fd in (self.memory, *self.peers, self.before, self.after) if fd >= 0]

    def close(self) -> None:
        """Close them in this process."""
        for fd in self.descriptors:
            os.close(fd)


def places_of(size: int, num_stages: int) -> list[Place]:
    """Return the places of all workers, by number."""
    return [Place(rank, size, stage, num_stages) for stage in range(num_stages) for rank in range(size)]


def make_wires(size: int, num_stages: int) -> list[Wires]:
    """Return the wires of all workers, by number. Errors: OSError."""
    wires = [Wires(peers=[]) for _ in range(size * num_stages)]
    try:
        for stage in range(num_stages):
            _join_ranks(wires[stage * size : (stage + 1) * size])
        for number in range(size * (num_stages - 1)):
            wires[number].after, wires[number + size].before = _pair()
    except BaseException:
        for one in wires:
            one.close()
        raise
    return wires


def _join_ranks(ranks: list[Wires]) -> None:
    if len(ranks) == 1:
        return
    # Imported here: only a group needs it, and it takes time.
    from kernels.cpu.group import make_shared_file

    memory = make_shared_file()
    try:
        for rank in ranks:
            rank.memory = above(memory)
    finally:
        os.close(memory)
    for rank in ranks[1:]:
        ours, theirs = _pair()
        ranks[0].peers.append(ours)
        rank.peers.append(theirs)


def _pair() -> tuple[int, int]:
    first, second = socket.socketpair()
    with first, second:
        return above(first.fileno()), above(second.fileno())


def above(fd: int) -> int:
    """Return a copy of a descriptor above the standard streams, whose numbers a child gives its own streams."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
