"""Peers: other engines from which KV blocks are requested by name; a KVConnector that stores nothing.

A peer that is not connected, does not answer in time, or sends something else is a miss: the blocks are computed. Each
wait has a limit, and a peer that exceeded one is not asked for a while.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from core import log
from core.tiers.block_file import BlockToLoad, BlockToStore
from core.tiers.connector import FETCH_S, LOOK_S
from core.tiers.peer_messages import (
    MAX_BLOCKS,
    FindBlocks,
    GetBlocks,
    Question,
    decode_answer,
    encode,
)
from ipc.wire.sockets import Context, Socket, connect_dealer, receive_event

#: How long, in seconds, a peer is not asked after it did not answer in time, and after it sent something that is not
#: the block.
PAUSE_S = 5.0
DISTRUST_S = 60.0
_IN_FLIGHT = 3  # unanswered requests for blocks, of MAX_BLOCKS each
_MAX_FOUND = 64  # lookups whose peer is remembered; the scheduler has fewer at a time


class Peers:
    """The peers at these addresses, used by one thread from open() to close(). clock: monotonic seconds."""

    def __init__(self, addresses: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._addresses, self._clock = addresses, clock
        self.connections: list[_Peer] = []
        self._found: dict[int, _Peer] = {}  # by ticket: the peer that has the blocks
        self._numbers = itertools.count(1)
        self._context: Context | None = None

    def open(self) -> None:
        """Connect, in the background. Errors: AddressError."""
        self._context = zmq.Context()
        self.connections = [_Peer(self._context, address) for address in self._addresses]

    def close(self) -> None:
        """Close the connections."""
        for peer in self.connections:
            peer.close()
        if self._context is not None:
            self._context.term()
        self.connections, self._context = [], None

    def find(self, lookup: int, names: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first on, one peer has. load() of this lookup asks that peer."""
        number, now = next(self._numbers), self._clock()
        question = FindBlocks(number, b"".join(names))
        waits = [peer for peer in self.connections if peer.paused_until <= now and peer.ask(question)]
        most, end = 0, now + LOOK_S
        poller = zmq.Poller()
        for peer in waits:
            peer.watch(poller)
        while waits and most < len(names) and (left := end - self._clock()) > 0:
            ready = dict(poller.poll(int(left * 1000) + 1))
            for peer in [one for one in waits if one.socket in ready or one.monitor in ready]:
                if (here := peer.receive(number)) is None and peer.is_connected():
                    continue
                waits.remove(peer)
                peer.unwatch(poller)
                if here is not None and most < (count := min(here[0], len(names))):
                    most, self._found[lookup] = count, peer
        if most < len(names):
            for peer in waits:
                peer.pause(self._clock(), f"has not answered within {LOOK_S:g} s")
        while len(self._found) > _MAX_FOUND:
            del self._found[next(iter(self._found))]
        return most

    def load(self, lookup: int, blocks: Sequence[BlockToLoad]) -> None:
        """Fetch blocks from the peer that has them, up to the first that it does not have or that is damaged."""
        peer = self._found.pop(lookup, None)
        if peer is None:
            return
        count, end, asked = 0, self._clock() + FETCH_S, 0  # number of blocks
        numbers: deque[int] = deque()
        while count < len(blocks):
            while asked < len(blocks) and len(numbers) < _IN_FLIGHT:
                numbers.append(next(self._numbers))
                names = b"".join(block.name for block in blocks[asked : asked + MAX_BLOCKS])
                if not peer.ask(GetBlocks(numbers[-1], names)):
                    return
                asked += MAX_BLOCKS
            number, wanted = numbers.popleft(), min(MAX_BLOCKS, len(blocks) - count)
            frames = self._wait(peer, number, end)
            if frames is None:
                return
            for frame in frames[:wanted]:
                if not blocks[count].take(frame):
                    peer.pause(self._clock(), "has sent a damaged or forged KV block, or none", DISTRUST_S)
                    return
                count += 1
            if len(frames) < wanted:
                return  # that many are gone at the peer

    def store(self, block: BlockToStore) -> bool:
        """Return False: peers ask for what they need."""
        return False

    def _wait(self, peer: "_Peer", number: int, end: float) -> list[memoryview] | None:
        """Wait for the answer to a request for blocks; None: it did not arrive in time, or the peer is gone."""
        poller = zmq.Poller()
        peer.watch(poller)
        while (left := end - self._clock()) > 0:
            poller.poll(int(left * 1000) + 1)
            if (sent := peer.receive(number)) is not None:
                return sent[1]
            if not peer.is_connected():
                return None
        peer.pause(self._clock(), f"has not sent its blocks within {FETCH_S:g} s")
        return None


class _Peer:
    """One peer."""

    monitor: Socket

    def __init__(self, context: Context, address: str) -> None:
        self.address = address
        self.socket = connect_dealer(context, address, self._prepare)
        self._is_connected = False
        self.paused_until = 0.0  # monotonic seconds

    def _prepare(self, socket: Socket) -> None:
        """Send only if there is a connection, and report all connections from the first on.

        Call this before connecting.
        """
        socket.setsockopt(zmq.IMMEDIATE, 1)
        self.monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)

    def watch(self, poller: zmq.Poller) -> None:
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)

    def unwatch(self, poller: zmq.Poller) -> None:
        poller.unregister(self.socket)
        poller.unregister(self.monitor)

    def is_connected(self) -> bool:
        """Return whether there is a connection at present."""
        while self.monitor.poll(0):
            self._is_connected = receive_event(self.monitor)[0] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return self._is_connected

    def ask(self, question: Question) -> bool:
        """Send a question. Return False if there is no connection."""
        if not self.is_connected():
            return False
        try:
            self.socket.send(encode(question), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, number: int) -> tuple[int, list[memoryview]] | None:
        """Return (count, frames) of the answer to a question; None: it has not arrived, or belongs to another."""
        try:
            head, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            answer = decode_answer(head.buffer)
        except (zmq.Again, msgspec.MsgspecError):
            return None
        return (answer.count, [frame.buffer for frame in frames]) if answer.number == number else None

    def pause(self, now: float, reason: str, seconds: float = PAUSE_S) -> None:
        self.paused_until = now + seconds
        log.say(f"engine-core: kv_peers: {self.address} {reason}; it is not asked for {seconds:g} s")
