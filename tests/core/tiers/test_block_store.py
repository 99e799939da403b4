"""The store of KV blocks: orders in, answers out, and no error of the disk in either."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.execution.shared_blocks import BlockMemory, SharedBlocks
from core.inputs import BlocksArrived, BlocksFound, BlocksStored, StoreNews
from core.kv.orders import Fetch, Leave, Look, Store
from core.tiers import block_store, connector
from core.tiers.block_folder import BlockFolder
from core.tiers.block_store import BlockStore
from core.tiers.connector import Tier
from core.tiers.portable_names import PortableNames

pytestmark = pytest.mark.timeout(60)
SIZE = 4  # tokens of a block
TOKENS = np.arange(3 * SIZE, dtype=np.int32)


class Parts:
    """A store with memory of 8 blocks in the cache and 8 on the host, in two layers each."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        rng = np.random.default_rng(1)
        self.cache = [rng.integers(0, 2**16, (8, 5), np.uint16) for _ in range(2)]
        self.host = [np.zeros((8, 5), np.uint16) for _ in range(2)]
        self.folder = BlockFolder(str(folder), 2**20)
        self.tier = Tier("kv_dir", self.folder, is_near=True)
        self.contents, self.evictions = np.arange(8), np.zeros(8, np.int64)
        self.blocks = SharedBlocks(BlockMemory(self.cache), BlockMemory(self.host), "layout")
        self.names = PortableNames(self.folder.key, "model", SIZE)
        self.store = BlockStore([self.tier], self.names, self.blocks, self.contents, self.evictions)

    def leave(self) -> Leave:
        """A request leaves its tokens in blocks 1, 2 and 3."""
        blocks = np.array([1, 2, 3], np.int32)
        return Leave(-1, TOKENS, blocks, self.contents[blocks], self.evictions[blocks])

    def save(self) -> list[StoreNews]:
        answers: list[StoreNews] = []
        while self.store.has_unsaved:
            if (answer := self.store.save_one()) is not None:
                answers.append(answer)
        return answers


def fetch(ticket: int = 7) -> Fetch:
    return Fetch(ticket, -1, TOKENS, 0, np.array([5, 6, 7], np.int32))


@pytest.fixture(name="parts")
def make_parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path / "kv")


def test_what_a_request_leaves_can_be_fetched(parts: Parts) -> None:
    assert parts.store.carry_out(parts.leave()) is None
    assert parts.save() == [BlocksStored(0, 3)]
    assert parts.store.carry_out(Look(1, -1, TOKENS, 1)) == BlocksFound(1, 2)
    assert parts.store.carry_out(Look(2, -2, TOKENS, 0)) == BlocksFound(2, 0)
    assert parts.store.carry_out(fetch()) == BlocksArrived(7, 3)
    for cache, host in zip(parts.cache, parts.host, strict=True):
        assert np.array_equal(host[5:], cache[1:4])


def test_what_was_evicted_before_it_was_written_is_not_written(parts: Parts) -> None:
    parts.store.carry_out(parts.leave())
    parts.contents[2] = 99
    parts.evictions[3] = 1
    assert parts.save() == [BlocksStored(0, 1)]


def test_blocks_on_the_host_are_written_under_the_names_that_were_left(parts: Parts) -> None:
    order = Store(3, np.array([4, 5], np.int32), np.array([2, 77]))
    assert parts.store.carry_out(order) == BlocksStored(3, 0), "nobody has left these contents"
    parts.store.carry_out(parts.leave())
    assert parts.store.carry_out(order) == BlocksStored(3, 1)
    assert parts.store.carry_out(Look(1, -1, TOKENS, 1)) == BlocksFound(1, 1)


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "while it is written"])
def test_blocks_of_a_host_pool_that_was_lost_are_not_written(
    parts: Parts, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may be another one then, with other bytes."""
    on_host = {4: 2 if is_late else 0}
    right = parts.folder.store

    def written(block: Any) -> bool:
        on_host[4] = 0
        return right(block)

    monkeypatch.setattr(parts.folder, "store", written)
    given: dict[str, Any] = {"on_host": lambda slot, content, is_beside: on_host[slot] == content}
    parts.store = BlockStore([parts.tier], parts.names, parts.blocks, parts.contents, parts.evictions, **given)
    parts.store.carry_out(parts.leave())
    assert parts.store.carry_out(Store(3, np.array([4], np.int32), np.array([2]))) == BlocksStored(3, 0)
    assert parts.store.carry_out(Look(1, -1, TOKENS, 1)) == BlocksFound(1, 0)


def test_a_fetch_ends_before_the_first_damaged_block(parts: Parts, tmp_path: Path) -> None:
    parts.store.carry_out(parts.leave())
    parts.save()
    _, second, _ = parts.names.chain(-1, TOKENS)
    file = tmp_path / "kv" / "blocks" / f"{second.hex()}.kv"
    file.write_bytes(file.read_bytes()[:-1])
    assert parts.store.carry_out(fetch()) == BlocksArrived(7, 1)


def test_an_error_of_the_disk_stops_writing_for_a_while(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, calls = [100.0], []

    def full(*arguments: Any) -> bool:
        calls.append(arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(block_store.time, "monotonic", lambda: clock[0])
    said: list[str] = []
    monkeypatch.setattr(connector.log, "say", said.append)
    with monkeypatch.context() as patch:
        patch.setattr(parts.folder, "store", full)
        parts.store.carry_out(parts.leave())
        assert parts.save() == []
    assert len(calls) == len(said) == 1
    assert "No space left" in said[0]
    order = Store(3, np.array([4], np.int32), np.array([2]))
    assert parts.store.carry_out(order) == BlocksStored(3, 0)
    clock[0] += 31
    assert parts.store.carry_out(order) == BlocksStored(3, 1)


def test_what_was_not_written_is_written_when_it_is_left_again(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once after an error of the disk, and within a minute after its file has gone."""
    clock = [100.0]

    def full(*arguments: Any) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(block_store.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(connector.log, "say", lambda text: None)
    with monkeypatch.context() as patch:
        patch.setattr(parts.folder, "store", full)
        parts.store.carry_out(parts.leave())
        assert parts.save() == []
    clock[0] += 31
    parts.store.carry_out(parts.leave())
    assert parts.save() == [BlocksStored(0, 3)]
    for path in (tmp_path / "kv" / "blocks").iterdir():
        path.unlink()  # as the folder's bound does
    parts.store.carry_out(parts.leave())
    assert not parts.store.has_unsaved
    clock[0] += 60
    parts.store.carry_out(parts.leave())
    assert parts.save() == [BlocksStored(0, 3)]


def test_a_block_that_is_used_in_memory_counts_as_used_on_the_disk(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a minute, so that not each request touches all of its files."""
    clock = [100.0]
    monkeypatch.setattr(block_store.time, "monotonic", lambda: clock[0])
    parts.store.carry_out(parts.leave())
    parts.save()
    paths = list((tmp_path / "kv" / "blocks").iterdir())
    for path in paths:
        os.utime(path, (0, 0))
    clock[0] += 59
    parts.store.carry_out(parts.leave())
    assert not parts.store.has_unsaved
    clock[0] += 1
    parts.store.carry_out(parts.leave())
    assert parts.save() == []
    assert all(path.stat().st_mtime > 0 for path in paths)


def test_the_oldest_blocks_that_wait_to_be_written_give_way(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(block_store, "MAX_UNSAVED", 2)
        parts.store.carry_out(parts.leave())
    assert parts.save() == [BlocksStored(0, 2)]
    parts.store.carry_out(parts.leave())
    assert parts.save() == [BlocksStored(0, 1)], "the one that had given way"
