"""KV blocks from another engine: what it has is fetched, and whatever is wrong with it or its answers is a miss."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from core.execution.shared_blocks import BlockMemory, SharedBlocks
from core.inputs import BlocksArrived, BlocksFound
from core.kv.orders import Fetch, Leave, Look, Store
from core.process.start import _listen
from core.tiers import peers as peers_module
from core.tiers.block_file import HEAD_BYTES, pack_block
from core.tiers.block_folder import BlockFolder
from core.tiers.block_store import BlocksServed, BlockStore, Shelves
from core.tiers.connector import Tier
from core.tiers.memory_shelf import MemoryShelf
from core.tiers.peer_messages import (
    BlocksHere,
    BlocksSent,
    FindBlocks,
    decode_answer,
    decode_question,
    encode,
    split_names,
)
from core.tiers.peer_server import PeerServer
from core.tiers.peers import DISTRUST_S, PAUSE_S, Peers
from core.tiers.portable_names import PortableNames
from ipc.keys.curve import add_client, make_engine_keys
from ipc.wire.sockets import bind_router
from tests.placed import PREFIX

pytestmark = pytest.mark.timeout(60)
SIZE, KEY = 4, bytes(range(32))
NUM = 20  # blocks: more than one question's
TOKENS = np.arange(NUM * SIZE, dtype=np.int32)
PLACES = np.arange(NUM, dtype=np.int32)
LOOK = Look(7, -1, TOKENS, 0)
FETCH = Fetch(7, -1, TOKENS, 0, PLACES)


class Site:
    """The memory of an engine, [NUM blocks] in the cache and on the host, and its store."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.cache = [rng.integers(0, 2**16, (NUM, 5), np.uint16) for _ in range(2)]
        self.host = [np.zeros((NUM + 3, 5), np.uint16) for _ in range(2)]
        self.blocks = SharedBlocks(BlockMemory(self.cache), BlockMemory(self.host), "layout")
        self.names = PortableNames(KEY, "model", SIZE)
        self.contents, self.evictions = np.arange(1, NUM + 1), np.zeros(NUM, np.int64)
        self.host_contents, self.times_given = np.full(NUM, -1), np.zeros(NUM, np.int64)
        self.store: BlockStore
        self.peers: Peers

    def serve(self, address: str, folder: BlockFolder | None = None) -> None:
        cache = MemoryShelf(self.blocks.cache, self.contents, self.evictions, KEY)
        host = MemoryShelf(self.blocks.host, self.host_contents, self.times_given, KEY, first=3)
        shelves = [cache, host] if folder is None else [cache, host, folder]
        served = BlocksServed(Shelves(cache, host), PeerServer(*_listen(address), shelves))
        tiers = [] if folder is None else [Tier("kv_dir", folder, is_near=True)]
        self.store = BlockStore(tiers, self.names, self.blocks, self.contents, self.evictions, served=served)
        self.store.open()

    def ask(self, address: str, clock: Callable[[], float] | None = None) -> None:
        peers = Peers([address]) if clock is None else Peers([address], clock)
        self.ask_all(peers)
        self.wait_for_connection(peers)

    def ask_all(self, peers: Peers) -> None:
        self.peers, tiers = peers, [Tier("kv_peers", peers, stores=False)]
        self.store = BlockStore(tiers, self.names, self.blocks, self.contents, self.evictions)
        self.store.open()

    def wait_for_connection(self, peers: Peers) -> None:
        for peer in peers.connections:
            while not peer.is_connected():
                assert peer.monitor.poll(10_000), "no connection"

    def leave(self) -> None:
        self.store.carry_out(Leave(-1, TOKENS, PLACES, self.contents[PLACES], self.evictions[PLACES]))


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for longer than an engine does, where an answer is to come."""
    monkeypatch.setattr(peers_module, "LOOK_S", 20.0)
    monkeypatch.setattr(peers_module, "FETCH_S", 20.0)


@pytest.fixture(name="address")
def ipc_address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/kv.sock"


@pytest.fixture(name="pair")
def two_engines(address: str) -> Iterator[tuple[Site, Site]]:
    giver, taker = Site(1), Site(2)
    giver.serve(address)
    taker.ask(address)
    yield giver, taker
    taker.store.close()
    giver.store.close()


def test_what_a_request_leaves_in_one_engine_is_fetched_by_another(pair: tuple[Site, Site]) -> None:
    giver, taker = pair
    assert taker.store.carry_out(LOOK) == BlocksFound(7, 0)
    giver.leave()
    assert taker.store.carry_out(LOOK) == BlocksFound(7, NUM)
    assert taker.store.carry_out(FETCH) == BlocksArrived(7, NUM)
    for cache, host in zip(giver.cache, taker.host, strict=True):
        assert np.array_equal(host[:NUM], cache)
    assert taker.store.carry_out(Look(8, -2, TOKENS, 0)) == BlocksFound(8, 0), "another salt or tenant"
    assert not giver.store.has_unsaved, "there is no folder to write to"


def test_blocks_in_the_host_s_memory_and_in_files_are_sent_too(address: str, tmp_path: Path) -> None:
    giver, taker, folder = Site(1), Site(2), BlockFolder(str(tmp_path / "kv"), 2**20, KEY)
    giver.serve(address, folder)
    taker.ask(address)
    giver.leave()
    giver.host[0][3:], giver.host[1][3:] = giver.cache[0], giver.cache[1]
    giver.host_contents[:] = giver.contents
    giver.store.carry_out(Store(1, PLACES + 3, giver.contents))  # into both: the host's slots 3, 4, ... and files
    giver.evictions += 1
    wanted = [part.copy() for part in giver.cache]
    for part in giver.cache:
        part[:] = 0
    giver.times_given[:10] += 1  # of these only the files are left
    giver.host[0][3:13] = 0
    assert taker.store.carry_out(LOOK) == BlocksFound(7, NUM)
    assert taker.store.carry_out(FETCH) == BlocksArrived(7, NUM)
    for part, host in zip(wanted, taker.host, strict=True):
        assert np.array_equal(host[:NUM], part)
    taker.store.close()
    giver.store.close()


def test_what_is_evicted_between_look_and_fetch_is_a_miss(pair: tuple[Site, Site]) -> None:
    giver, taker = pair
    giver.leave()
    assert taker.store.carry_out(LOOK) == BlocksFound(7, NUM)
    giver.evictions[11] += 1
    assert taker.store.carry_out(FETCH) == BlocksArrived(7, 11)
    giver.contents[2] = 99
    assert taker.store.carry_out(LOOK) == BlocksFound(7, 2)


def test_a_block_that_is_overwritten_while_it_is_copied_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(1)
    shelf = MemoryShelf(site.blocks.cache, site.contents, site.evictions, KEY)
    shelf.put(b"n" * 16, 3, 4, 0)
    assert shelf.pack(b"n" * 16) == pack_block(b"n" * 16, site.blocks.cache.views(3), KEY)

    def pack_slowly(name: bytes, parts: list[memoryview], key: bytes) -> bytearray:
        site.evictions[3] += 1
        return pack_block(name, parts, key)

    monkeypatch.setattr(f"{PREFIX}core.tiers.memory_shelf.pack_block", pack_slowly)
    assert shelf.pack(b"n" * 16) is None


def test_a_peer_that_is_gone_is_a_miss_at_once_and_one_that_comes_back_is_asked(
    pair: tuple[Site, Site], address: str
) -> None:
    giver, taker = pair
    giver.leave()
    assert taker.store.carry_out(LOOK) == BlocksFound(7, NUM)
    giver.store.close()
    assert taker.store.carry_out(FETCH) == BlocksArrived(7, 0)
    assert taker.store.carry_out(LOOK) == BlocksFound(7, 0)
    giver.serve(address)
    giver.leave()
    for peer in taker.peers.connections:
        peer.paused_until = 0.0
    taker.wait_for_connection(taker.peers)
    assert taker.store.carry_out(LOOK) == BlocksFound(7, NUM)


def test_the_peer_with_the_longest_beginning_is_read_from(tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("a", "b")]
    short, whole, taker = Site(1), Site(3), Site(2)
    for site, address in zip((short, whole), addresses, strict=True):
        site.serve(address)
        site.leave()
    short.contents[5] = 99
    peers = Peers([*addresses, f"ipc://{tmp_path}/nobody"])
    taker.ask_all(peers)
    for peer in peers.connections[:2]:
        while not peer.is_connected():
            assert peer.monitor.poll(10_000), "no connection"
    assert taker.store.carry_out(LOOK) == BlocksFound(7, NUM)
    assert taker.store.carry_out(FETCH) == BlocksArrived(7, NUM)
    assert np.array_equal(taker.host[0][:NUM], whole.cache[0])
    for site in (taker, short, whole):
        site.store.close()


def test_over_tcp_a_peer_needs_a_key_that_is_allowed(tmp_path: Path) -> None:
    make_engine_keys(str(tmp_path / "keys"))
    add_client(str(tmp_path / "keys"), "decode", str(tmp_path / "decode.json"))
    make_engine_keys(str(tmp_path / "others"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    giver, taker, stranger = Site(1), Site(2), Site(2)
    giver.serve(f"{address}?keys={tmp_path}/keys")
    giver.leave()
    taker.ask(f"{address}?keys={tmp_path}/decode.json")
    assert taker.store.carry_out(LOOK) == BlocksFound(7, NUM)
    assert taker.store.carry_out(FETCH) == BlocksArrived(7, NUM)
    for suffix in ("", f"?keys={tmp_path}/others"):
        peers = Peers([f"{address}{suffix}"])
        stranger.ask_all(peers)
        assert peers.connections[0].monitor.poll(10_000), "the end of the attempt"
        assert not peers.connections[0].is_connected()
        assert stranger.store.carry_out(LOOK) == BlocksFound(7, 0)
        stranger.store.close()
    for site in (taker, giver):
        site.store.close()


class Liar:
    """A peer that answers as the test wants."""

    def __init__(self, address: str, answer: Callable[[bytes], list[bytes]]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router, self._answer = bind_router(self._context, address), answer
        self._is_ended = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_ended:
            if self._router.socket.poll(20):
                identity, frame = self._router.socket.recv_multipart()
                with contextlib.suppress(zmq.ZMQError):  # the asker has gone
                    if answer := self._answer(frame):
                        self._router.socket.send_multipart([identity, *answer])
        self._router.close(0)
        self._context.term()

    def close(self) -> None:
        self._is_ended = True
        self._thread.join()


def lie(site: Site, change: Callable[[int, bytearray], bytearray], key: bytes = KEY) -> Callable[[bytes], list[bytes]]:
    """Answer as an engine that has all blocks would; change(place, bytes of a block) spoils them. key: of the liar."""
    place_of = {name: place for place, name in enumerate(site.names.chain(-1, TOKENS))}

    def answer(frame: bytes) -> list[bytes]:
        question = decode_question(frame)
        names = split_names(question.names)
        if isinstance(question, FindBlocks):
            return [encode(BlocksHere(question.number, len(names)))]
        packed = [pack_block(name, site.blocks.cache.views(place_of[name]), key) for name in names]
        blocks = [bytes(change(place_of[name], data)) for name, data in zip(names, packed, strict=True)]
        return [encode(BlocksSent(question.number, len(blocks))), *blocks]

    return answer


def test_blocks_that_were_forged_without_the_key_are_misses(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who stands at a peer's address learns the names from the questions, and no more."""
    said = list[str]()
    monkeypatch.setattr(peers_module.log, "say", said.append)
    for key, expected in ((bytes(32), 0), (KEY, NUM)):
        taker, liar = Site(2), Liar(address, lie(Site(1), lambda place, data: data, key))
        taker.ask(address)
        assert taker.store.carry_out(LOOK) == BlocksFound(7, NUM)
        assert taker.store.carry_out(FETCH) == BlocksArrived(7, expected)
        taker.store.close()
        liar.close()
    assert "damaged or forged" in said[0]


def test_every_byte_flipped_and_every_length_is_a_miss(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module.log, "say", lambda text: None)
    now = [0.0]
    giver, taker = Site(1), Site(2)
    length = HEAD_BYTES + giver.blocks.cache.bytes_per_block
    damage: list[tuple[int, int]] = []  # (place of the block, byte to flip; from `length` on: bytes to keep)

    def spoil(place: int, data: bytearray) -> bytearray:
        at, byte = damage[-1]
        if place != at:
            return data
        if byte < length:
            data[byte] ^= 1
            return data
        return data[: byte - length] if byte < 2 * length else data + b"x"

    liar = Liar(address, lie(giver, spoil))
    taker.ask(address, lambda: now[0])
    for byte in range(2 * length + 1):
        damage.append((byte % NUM, byte))
        now[0] += DISTRUST_S + 1
        for part in taker.host:
            part[:] = 0
        assert taker.store.carry_out(LOOK) == BlocksFound(7, NUM)
        assert taker.store.carry_out(FETCH) == BlocksArrived(7, byte % NUM)
        for cache, host in zip(giver.cache, taker.host, strict=True):
            assert np.array_equal(host[: byte % NUM], cache[: byte % NUM])
            assert not host[byte % NUM :].any(), "bytes of a damaged block"
        assert taker.store.carry_out(LOOK) == BlocksFound(7, 0), "it is not trusted for a while"
    taker.store.close()
    liar.close()


def test_answers_that_make_no_sense_or_do_not_come_are_misses(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(peers_module.log, "say", said.append)
    giver, taker = Site(1), Site(2)
    right = lie(giver, lambda place, data: data)
    answers: list[Callable[[bytes], list[bytes]]] = [right]
    liar = Liar(address, lambda frame: answers[-1](frame))
    taker.ask(address)
    (peer,) = taker.peers.connections

    def outcome(look: Callable[[bytes], list[bytes]], fetch: Callable[[bytes], list[bytes]]) -> tuple[int, int]:
        peer.paused_until = 0.0
        answers.append(look)
        monkeypatch.setattr(peers_module, "LOOK_S", 20.0 if look is right or look is much else 0.05)
        found = taker.store.carry_out(LOOK)
        answers.append(fetch)
        monkeypatch.setattr(peers_module, "FETCH_S", 0.05 if fetch is is_silent else 20.0)
        arrived = taker.store.carry_out(FETCH)
        assert isinstance(found, BlocksFound)
        assert isinstance(arrived, BlocksArrived)
        return found.count, arrived.count

    def is_silent(frame: bytes) -> list[bytes]:
        return []

    def counts(count: int) -> Callable[[bytes], list[bytes]]:
        return lambda frame: [encode(BlocksHere(decode_question(frame).number, count))]

    much = counts(2**60)
    assert outcome(right, right) == (NUM, NUM)
    assert outcome(is_silent, right) == (0, 0)
    assert "has not answered" in said[-1]
    assert outcome(lambda frame: [b"\xc1nonsense"], right) == (0, 0)
    assert outcome(lambda frame: [encode(BlocksHere(decode_question(frame).number - 1, NUM))], right) == (0, 0)
    assert outcome(much, right) == (NUM, NUM), "more than was asked for"
    assert outcome(counts(-5), right) == (0, 0)
    assert outcome(right, is_silent) == (NUM, 0)
    assert "has not sent" in said[-1]
    assert outcome(right, lambda frame: right(frame)[:1]) == (NUM, 0), "blocks without their bytes"
    assert outcome(right, lambda frame: [*right(frame), *right(frame)[1:]]) == (NUM, NUM), "too many of them"
    assert PAUSE_S < DISTRUST_S
    taker.store.close()
    liar.close()


def test_hostile_questions_are_no_end_of_a_server(address: str) -> None:
    giver = Site(1)
    giver.serve(address)
    giver.leave()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asker = context.socket(zmq.DEALER)
    asker.linger = 0
    asker.connect(address)
    names = b"".join(giver.names.chain(-1, TOKENS))
    for frames in ([b""], [b"x"], [b"a", b"b"], [encode(BlocksHere(1, 2))], [encode(FindBlocks(1, names[:-1]))]):
        asker.send_multipart(frames)
    asker.send(encode(FindBlocks(2, names)))
    answers = {}
    while 2 not in answers:
        assert asker.poll(10_000)
        answer = BlocksHere(*(int(number) for number in _fields(asker.recv())))
        answers[answer.number] = answer.count
    assert answers == {1: 0, 2: NUM}
    asker.close(0)
    context.term()
    giver.store.close()


def _fields(frame: bytes) -> list[int]:
    answer = decode_answer(frame)
    return [answer.number, answer.count]
