"""Wires: the connections between the workers of one executor, as inherited descriptors; and the workers' places.

A worker is a rank of a stage. The ranks of a stage share memory if they are on one machine, and the first of them has a
channel to each of the others. Ranks with the same number in consecutive stages have a channel between them. A
connection between workers on different machines ends, on each machine, in a descriptor that is forwarded
(core/workers/carrier.py).
"""

import fcntl
import os
import socket
from typing import NamedTuple

import msgspec


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A worker's place: a rank of `size`, in a stage of `num_stages`. Workers are spread over `num_nodes` machines."""

    rank: int = 0
    size: int = 1
    stage: int = 0
    num_stages: int = 1
    num_nodes: int = 1
    first_node: int = 0

    @property
    def number(self) -> int:
        """Return the worker's number, stage after stage."""
        return self.stage * self.size + self.rank

    @property
    def count(self) -> int:
        """Return the number of workers."""
        return self.num_stages * self.size

    @property
    def node(self) -> int:
        """Return the machine that the worker runs on.

        Machine 0 is the engine's, which has no workers if first_node is 1. Consecutive workers share a machine.
        """
        return self.node_of(self.number)

    def node_of(self, number: int) -> int:
        """Return the machine of a worker of this executor."""
        return self.first_node + number * self.num_nodes // self.count

    @property
    def neighbours(self) -> list[int]:
        """Return the numbers of all workers on this one's machine."""
        return [number for number in range(self.count) if self.node_of(number) == self.node]

    @property
    def shares_memory(self) -> bool:
        """Return whether the ranks of its stage are on one machine."""
        first = self.stage * self.size
        return self.node_of(first) == self.node_of(first + self.size - 1)

    @property
    def is_last_stage(self) -> bool:
        """Return whether its stage samples."""
        return self.stage == self.num_stages - 1

    @property
    def answers(self) -> bool:
        """Return whether it is the one worker that answers steps."""
        return self.is_last_stage and self.rank == 0


class Wires(msgspec.Struct, array_like=True):
    """A worker's descriptors. memory: -1 = its stage has one rank. before, after: -1 = there is no such stage.

    blocks: the file for its KV blocks, which the engine reads and writes; asked: instead, on another machine than the
    engine or with a GPU, the stream on which it asks for them; both -1 = the engine has no store of blocks.

    peers: for the first rank, the channels to the others; for any other, the one to the first. ranks: if ranks share no
    memory, a stream to each of them, -1 to itself.
    """

    memory: int = -1
    peers: list[int] = []
    before: int = -1
    after: int = -1
    ranks: list[int] = []
    blocks: int = -1
    asked: int = -1

    @property
    def descriptors(self) -> list[int]:
        """Return all descriptors."""
        single = self.memory, self.blocks, self.asked, self.before, self.after
        return [fd for fd in (*single, *self.peers, *self.ranks) if fd >= 0]

    def close(self) -> None:
        """Close them in this process."""
        for fd in self.descriptors:
            os.close(fd)


class Link(NamedTuple):
    """A connection between two workers, given by number, of one kind: "peers", "stages" or "ranks"."""

    kind: str
    first: int
    second: int


class Wiring(NamedTuple):
    """The connections of one machine's workers."""

    wires: dict[int, Wires]  # by worker number
    carried: dict[int, int]  # by stream_of(): our ends of links to workers elsewhere

    def close(self) -> None:
        """Close everything in this process."""
        for one in self.wires.values():
            one.close()
        for fd in self.carried.values():
            os.close(fd)


def places_of(size: int, num_stages: int, num_nodes: int = 1, first_node: int = 0) -> list[Place]:
    """Return the places of all workers, by number."""
    return [
        Place(rank, size, stage, num_stages, num_nodes, first_node)
        for stage in range(num_stages)
        for rank in range(size)
    ]


def links_of(places: list[Place]) -> list[Link]:
    """Return all links between workers."""
    links = list[Link]()
    for place in places:
        number = place.number
        links += [Link("peers", number, number + rank) for rank in range(1, place.size) if place.rank == 0]
        if not place.shares_memory:
            links += [Link("ranks", number, number + rank) for rank in range(1, place.size - place.rank)]
        if not place.is_last_stage:
            links.append(Link("stages", number, number + place.size))
    return links


def stream_of(link: int, places: list[Place]) -> int:
    """Return the number of a link's byte stream. The workers' own channels have the workers' numbers."""
    return len(places) + link


def block_stream_of(number: int, places: list[Place]) -> int:
    """Return the number of the byte stream on which the engine asks a worker for its KV blocks."""
    return len(places) + len(links_of(places)) + number


def ends_of_streams(places: list[Place]) -> dict[int, tuple[int, int]]:
    """Return the machines at the ends of each stream between two machines."""
    found = {place.number: (0, place.node) for place in places}
    found |= {block_stream_of(place.number, places): (0, place.node) for place in places}
    for index, link in enumerate(links_of(places)):
        found[stream_of(index, places)] = places[link.first].node, places[link.second].node
    return {stream: ends for stream, ends in found.items() if ends[0] != ends[1]}


def make_wires(places: list[Place], node: int = 0, *, has_store: bool = False) -> Wiring:
    """Return the wires of all workers on one machine. has_store: the engine has a store of blocks. Errors: OSError."""
    own = {place.number: Wires(peers=[], ranks=[]) for place in places if place.node == node}
    wiring = Wiring(own, {})
    try:
        for number in own:
            if not places[number].shares_memory:
                own[number].ranks = [-1] * places[number].size
        for stage in range(places[0].num_stages):
            first = places[stage * places[0].size]
            if first.size > 1 and first.shares_memory and first.node == node:
                _share_memory([own[first.number + rank] for rank in range(first.size)])
        for index, link in enumerate(links_of(places)):
            _connect(wiring, link, stream_of(index, places), places)
        for number in own if has_store and node else ():
            own[number].asked, wiring.carried[block_stream_of(number, places)] = _pair()
    except BaseException:
        wiring.close()
        raise
    return wiring


def _connect(wiring: Wiring, link: Link, stream: int, places: list[Place]) -> None:
    """Create a link if one of its ends is on this machine."""
    here = [number for number in (link.first, link.second) if number in wiring.wires]
    if not here:
        return
    ends = list(_pair())
    if len(here) == 1:
        wiring.carried[stream] = ends.pop()
    for number, fd in zip(here, ends, strict=True):
        wires, other = wiring.wires[number], link.second if number == link.first else link.first
        match link.kind:
            case "peers":
                wires.peers.append(fd)
            case "ranks":
                wires.ranks[places[other].rank] = fd
            case _ if number == link.first:
                wires.after = fd
            case _:
                wires.before = fd


def _share_memory(ranks: list[Wires]) -> None:
    # Imported here because only a group needs it, and it takes time.
    from kernels.cpu.group import make_shared_file

    memory = make_shared_file()
    try:
        for rank in ranks:
            rank.memory = above(memory)
    finally:
        os.close(memory)


def _pair() -> tuple[int, int]:
    first, second = socket.socketpair()
    with first, second:
        return above(first.fileno()), above(second.fileno())


def above(fd: int) -> int:
    """Return a copy of a descriptor above the standard streams, whose numbers a child uses for its own."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
