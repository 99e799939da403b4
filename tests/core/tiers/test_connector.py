"""KV connectors from elsewhere: whatever they do costs time, and neither tokens nor the engine's thread."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.execution.shared_blocks import BlockMemory
from core.inputs import BlocksArrived, BlocksFound, BlocksStored
from core.kv.orders import Look
from core.tiers import block_file, connector
from core.tiers.block_file import HEAD_BYTES, BlockToLoad, BlockToStore, pack_block
from core.tiers.block_store import BlockStore
from core.tiers.connector import DISTRUST_S, PAUSE_S, STORE_PAUSE_S, Guard, Tier
from tests.core.tiers.test_block_store import TOKENS, Parts, fetch

pytestmark = pytest.mark.timeout(60)
KEY, NAME = bytes(range(32)), bytes(16)
LOOK = Look(1, -1, TOKENS, 0)


class Shelf:
    """A connector as it should be, in memory. calls: names of those made. before: runs at each call."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.before: Callable[[str], Any] = lambda call: None

    def _begin(self, call: str) -> Any:
        self.calls.append(call)
        return self.before(call)

    def open(self) -> None:
        self._begin("open")

    def close(self) -> None:
        self._begin("close")

    def find(self, lookup: int, names: Sequence[bytes]) -> int:
        if (answer := self._begin("find")) is not None:
            return answer  # type: ignore[no-any-return]
        return next((count for count, name in enumerate(names) if name not in self.blocks), len(names))

    def load(self, lookup: int, blocks: Sequence[BlockToLoad]) -> None:
        self._begin("load")
        for block in blocks:
            if (data := self.blocks.get(block.name)) is None:
                return
            block.take(data)

    def store(self, block: BlockToStore) -> bool:
        self._begin("store")
        data = block.pack()
        if data is None or block.name in self.blocks:
            return False
        self.blocks[block.name] = bytes(data)
        return True


class Rig:
    """The store of test_block_store with a guarded shelf in place of its folder, under a clock of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **role: bool) -> None:
        self.now, self.shelf = 100.0, Shelf()
        self.said: list[str] = []
        monkeypatch.setattr(connector.log, "say", self.said.append)
        monkeypatch.setattr(connector.time, "monotonic", lambda: self.now)
        self.parts = Parts(folder)
        blocks = self.parts.blocks
        tier = Tier("kv_transfer_config", Guard("shelf", self.shelf, lambda: self.now), **role)
        self.store = self.parts.store = BlockStore(
            [tier], self.parts.names, blocks, self.parts.contents, self.parts.evictions
        )
        self.store.open()

    def leave(self) -> list[Any]:
        self.store.carry_out(self.parts.leave())
        return self.parts.save()

    def look(self) -> int:
        answer = self.store.carry_out(LOOK)
        assert isinstance(answer, BlocksFound)
        return answer.count


@pytest.fixture(name="rig")
def make_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path / "kv", monkeypatch)


def test_what_a_request_leaves_comes_back_from_a_connector(rig: Rig) -> None:
    assert rig.look() == 0
    assert rig.leave() == [BlocksStored(0, 3)]
    assert rig.look() == 3
    assert rig.store.carry_out(fetch()) == BlocksArrived(7, 3)
    for cache, host in zip(rig.parts.cache, rig.parts.host, strict=True):
        assert np.array_equal(host[5:], cache[1:4])
    rig.store.close()
    assert rig.shelf.calls == ["open", "find", *["store"] * 3, "find", "load", "close"]


@pytest.mark.parametrize(
    ("role", "calls"),
    [
        ({"loads": False}, ["open", "store", "store", "store"]),
        ({"stores": False}, ["open", "find", "load"]),
    ],
)
def test_a_role_is_one_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: dict[str, bool], calls: list[str]
) -> None:
    rig = Rig(tmp_path / "kv", monkeypatch, **role)
    assert len(rig.leave()) == ("store" in calls)
    assert rig.look() == 0
    assert rig.store.carry_out(fetch()) == BlocksArrived(7, 0)
    assert rig.shelf.calls == calls


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"", bytes.swapcase])
def test_what_was_not_stored_is_a_miss_and_said_once_a_minute(rig: Rig, change: Callable[[bytes], bytes]) -> None:
    rig.leave()
    second = list(rig.parts.names.chain(-1, TOKENS))[1]
    rig.shelf.blocks[second] = change(rig.shelf.blocks[second])
    for _ in range(2):
        rig.parts.host[0][6] = 7
        assert rig.store.carry_out(fetch()) == BlocksArrived(7, 1)
        assert (rig.parts.host[0][6] == 7).all(), "bytes of a block that was not stored"
    assert len(rig.said) == 1
    assert "damaged or forged" in rig.said[0]
    assert rig.look() == 3, "it is still asked"


def fail(error: Exception) -> Callable[[str], None]:
    def raise_it(call: str) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("before", "seconds", "text"),
    [
        (
            fail(ConnectionRefusedError("no server")),
            PAUSE_S,
            "ConnectionRefusedError: no server; it is not asked for 5",
        ),
        (fail(KeyError("bug")), DISTRUST_S, "has raised KeyError: 'bug'; it is not called for 60 s"),
        (lambda call: "three", DISTRUST_S, "find() has returned 'three', not a number"),
        (lambda call: True, DISTRUST_S, "find() has returned True"),
    ],
)
def test_a_connector_that_fails_is_a_miss_and_left_alone_for_a_while(
    rig: Rig, before: Callable[[str], Any], seconds: float, text: str
) -> None:
    rig.leave()
    rig.shelf.before = before
    assert rig.look() == 0
    assert text in rig.said[0]
    rig.shelf.before = lambda call: None
    rig.now += seconds - 0.1
    count = len(rig.shelf.calls)
    assert rig.look() == 0
    assert rig.store.carry_out(fetch()) == BlocksArrived(7, 0)
    assert len(rig.shelf.calls) == count
    rig.now += 0.2
    assert rig.look() == 3
    assert len(rig.said) == 1


@pytest.mark.parametrize(("answer", "found"), [(2**70, 3), (-5, 0), (2, 2)])
def test_a_wrong_number_is_cut(rig: Rig, answer: int, found: int) -> None:
    rig.shelf.before = lambda call: answer if call == "find" else None
    assert rig.look() == found
    assert rig.store.carry_out(fetch()) == BlocksArrived(7, 0), "it has none of them"


def test_a_slow_connector_is_not_asked_for_a_while(rig: Rig) -> None:
    rig.leave()

    def be_slow(call: str) -> None:
        rig.now += 0.5

    rig.shelf.before = be_slow
    assert rig.look() == 3
    assert "it took 0.5 s instead of up to 0.2; it is not asked for 5 s" in rig.said[0]
    assert rig.look() == 0
    rig.now += PAUSE_S
    assert rig.store.carry_out(fetch()) == BlocksArrived(7, 3), "half a second is not long for blocks"
    assert len(rig.said) == 1


@pytest.mark.parametrize("seconds", [0, 10])
def test_what_cannot_be_stored_is_left_out_for_a_while(rig: Rig, seconds: float) -> None:
    def be_full(call: str) -> None:
        rig.now += seconds
        if not seconds:
            raise OSError("the server is full")

    rig.shelf.before = be_full
    assert rig.leave() == []
    assert rig.shelf.calls.count("store") == 1
    assert rig.said[0].endswith("no blocks are written for 30 s")
    rig.shelf.before, rig.shelf.blocks = lambda call: None, {}
    rig.now += STORE_PAUSE_S
    assert rig.leave() == [BlocksStored(0, 3)]


def test_a_bug_in_storing_ends_no_thread(rig: Rig) -> None:
    rig.shelf.before = fail(ZeroDivisionError())
    assert rig.leave() == []
    assert "store() has raised ZeroDivisionError" in rig.said[0]
    assert rig.shelf.calls == ["open", "store"]
    rig.store.close()
    assert "close() has raised ZeroDivisionError" in rig.said[1]


def test_a_block_that_comes_too_late_does_not_reach_a_place_that_others_have(rig: Rig) -> None:
    kept: list[BlockToLoad] = []
    rig.leave()
    load = rig.shelf.load
    rig.shelf.load = lambda lookup, blocks: kept.extend(blocks)  # type: ignore[method-assign]
    assert rig.store.carry_out(fetch()) == BlocksArrived(7, 0)
    for part in rig.parts.host:
        part[:] = 7
    thread = threading.Thread(target=lambda: load(7, kept))
    thread.start()
    thread.join()
    assert not any(block.is_loaded for block in kept)
    assert all((part == 7).all() for part in rig.parts.host)


def test_a_block_that_is_overwritten_while_it_is_packed_is_not_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store.carry_out(rig.parts.leave())
    first, second, third = rig.parts.names.chain(-1, TOKENS)

    def pack_slowly(name: bytes, *arguments: Any) -> bytearray:
        if name == second:
            rig.parts.evictions[2] += 1
        return pack_block(name, *arguments)

    monkeypatch.setattr(block_file, "pack_block", pack_slowly)
    assert rig.parts.save() == [BlocksStored(0, 2)]
    assert list(rig.shelf.blocks) == [first, third]


def test_a_block_that_one_connector_lacks_comes_from_the_next(rig: Rig) -> None:
    rig.leave()
    folder = rig.parts.tier
    names = list(rig.parts.names.chain(-1, TOKENS))
    for place in (0, 2):
        parts = [memoryview(row).cast("B") for row in (rig.parts.cache[0][place + 1], rig.parts.cache[1][place + 1])]
        assert folder.store(BlockToStore(names[place], parts, rig.parts.names.key))
    tiers = [folder, Tier("kv_transfer_config", rig.shelf)]
    store = BlockStore(tiers, rig.parts.names, rig.parts.blocks, rig.parts.contents, rig.parts.evictions)
    assert store.carry_out(LOOK) == BlocksFound(1, 3)
    assert store.carry_out(fetch()) == BlocksArrived(7, 3)
    for cache, host in zip(rig.parts.cache, rig.parts.host, strict=True):
        assert np.array_equal(host[5:], cache[1:4])


def test_a_folder_reads_into_the_cache_itself_and_each_byte_is_digested_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before there were connectors: one call a block, no buffer in between."""
    parts = Parts(tmp_path / "kv")
    digest, readv, writev = block_file._digest, os.readv, os.writev
    digested, buffers = list[int](), list[memoryview]()

    def count_digest(name: bytes, size: int, given: Sequence[memoryview], key: bytes) -> bytes:
        digested.append(size)
        return digest(name, size, given, key)

    def see(call: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def called(fd: int, given: list[memoryview]) -> int:
            buffers.extend(given)
            return call(fd, given)

        return called

    monkeypatch.setattr(block_file, "_digest", count_digest)
    monkeypatch.setattr(os, "readv", see(readv))
    monkeypatch.setattr(os, "writev", see(writev))
    parts.store.carry_out(parts.leave())
    parts.save()
    assert parts.store.carry_out(fetch()) == BlocksArrived(7, 3)
    assert digested == [BlockMemory(parts.cache).bytes_per_block] * 6, "3 blocks written, 3 read"
    heads = [one for one in buffers if len(one) == HEAD_BYTES]
    rest = [np.frombuffer(one, np.uint8) for one in buffers if len(one) != HEAD_BYTES]
    assert (len(heads), len(rest)) == (6, 12)
    own = [*parts.cache, *parts.host]
    assert all(any(np.shares_memory(one, array) for array in own) for one in rest)


def test_what_is_no_bytes_is_the_connector_s_bug() -> None:
    room = BlockToLoad(NAME, [memoryview(bytearray(5))], KEY)
    with pytest.raises(TypeError):
        room.take("text")  # type: ignore[arg-type]
    assert not room.is_loaded
