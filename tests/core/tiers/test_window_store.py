"""The store of KV blocks where layers with a window have blocks of their own: from files, from peers, and from both."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from core.execution.shared_blocks import BlockMemory, SharedBlocks
from core.inputs import BlocksArrived, BlocksFound, BlocksStored
from core.kv.beside import Beside
from core.kv.block_names import BlockNames
from core.kv.cache_kinds import CacheKind
from core.kv.orders import Fetch, Leave, Look, Store, Windows
from core.tiers.block_file import BlockToLoad, BlockToStore
from core.tiers.block_folder import BlockFolder
from core.tiers.block_store import BesideContents, BlockStore
from core.tiers.connector import Tier
from core.tiers.portable_names import PortableNames

pytestmark = pytest.mark.timeout(60)
SIZE, PAGE = 4, 2  # tokens of a block, blocks of a page
NUM = 6  # blocks of the prompt, in blocks 2 to 7, and beside them in pages 4 to 9
KIND = CacheKind(SIZE, 1, 2 * SIZE + 1, NUM)  # a window of two blocks
TOKENS = np.arange(NUM * SIZE, dtype=np.int32)
ROOT = -1


class FakePeers:
    """A connector that has blocks of these names."""

    def __init__(self, blocks: dict[bytes, bytes]) -> None:
        self.blocks, self.num_questions = blocks, 0

    def open(self) -> None:
        """There is nothing to open."""

    def close(self) -> None:
        """There is nothing to close."""

    def find(self, lookup: int, names: Sequence[bytes]) -> int:
        self.num_questions += 1
        return next((count for count, name in enumerate(names) if name not in self.blocks), len(names))

    def load(self, lookup: int, blocks: Sequence[BlockToLoad]) -> None:
        for block in blocks:
            if block.name not in self.blocks:
                return
            assert block.take(self.blocks[block.name])

    def store(self, block: BlockToStore) -> bool:
        return False


class Parts:
    """A store with memory of 10 pages in the cache and 40 blocks on the host, in two layers each."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(1)
        self.cache = [rng.integers(0, 2**16, (10 * PAGE, 5), np.uint16) for _ in range(2)]
        self.host = [np.zeros((40, 5), np.uint16) for _ in range(2)]
        self.folder = BlockFolder(str(folder), 2**20)
        self.pages, self.evictions = BlockNames(10 * PAGE, SIZE, (Beside(10, PAGE),)), np.zeros(10 * PAGE, np.int64)
        blocks = SharedBlocks(BlockMemory(self.cache), BlockMemory(self.host), "layout")
        self.names = PortableNames(self.folder.key, "model", SIZE)
        self.peers = FakePeers({})
        tiers = [Tier("kv_dir", self.folder, is_near=True), Tier("kv_peers", self.peers, stores=False)]
        columns = self.pages.content, self.evictions
        self.store = BlockStore(tiers, self.names, blocks, *columns, beside=BesideContents(self.pages))
        self.chain = list(self.names.chain(ROOT, TOKENS))
        self.blocks = np.arange(2, 2 + NUM)
        self.pages.content[self.blocks] = 100 + np.arange(NUM)
        self.beside = (4 + np.arange(NUM)) * PAGE
        self.pages.beside[0].put(self.blocks, self.beside)

    def leave(self) -> None:
        contents = self.pages.content[self.blocks]
        evictions = self.evictions[self.blocks], self.beside.astype(np.int32), self.evictions[self.beside]
        self.store.carry_out(Leave(ROOT, TOKENS, self.blocks.astype(np.int32), contents, *evictions))

    def save(self) -> None:
        while self.store.has_unsaved:
            self.store.save_one()

    def paths(self, places: Sequence[int], *, beside: bool) -> list[Path]:
        folder = Path(f"/proc/self/fd/{self.folder._blocks}").resolve()
        names = [self.names.beside(self.chain[one]) if beside else self.chain[one] for one in places]
        return [folder / f"{name.hex()}.kv" for name in names]

    def give_to_peers(self, places: Sequence[int], *, beside: bool) -> None:
        """Let the peers have these blocks, and not the folder."""
        for path in self.paths(places, beside=beside):
            self.peers.blocks[bytes.fromhex(path.stem)] = path.read_bytes()
            path.unlink()

    def look(self, least: int = 0, most: int = NUM, here: Sequence[int] = ()) -> int:
        is_here = np.isin(np.arange(NUM), here)
        answer = self.store.carry_out(Look(1, ROOT, TOKENS, 0, Windows(KIND, least, most, is_here)))
        assert isinstance(answer, BlocksFound)
        return answer.count

    def fetch(self, count: int, places: Sequence[int]) -> int:
        """Read the first blocks into slots 0, 1, ..., and those beside these places into slots 20 and 21, ..."""
        slots, of_windows = np.arange(count), 20 + np.arange(PAGE * len(places))
        own = slots.astype(np.int32), np.array(places, np.int32), of_windows.astype(np.int32)
        answer = self.store.carry_out(Fetch(1, ROOT, TOKENS, 0, *own))
        assert isinstance(answer, BlocksArrived)
        return answer.count


@pytest.fixture(name="parts")
def make_parts(tmp_path: Path) -> Parts:
    parts = Parts(tmp_path / "kv")
    parts.leave()
    parts.save()
    return parts


def test_both_kinds_are_written_and_read(parts: Parts) -> None:
    assert parts.look() == NUM
    assert parts.fetch(NUM, [4, 5]) == NUM + 2
    for cache, host in zip(parts.cache, parts.host, strict=True):
        assert np.array_equal(host[:NUM], cache[parts.blocks])
        assert np.array_equal(host[20:24], cache[parts.beside[4] : parts.beside[4] + 4])


def test_a_prefix_ends_where_its_window_is_there_or_in_the_engine(parts: Parts) -> None:
    for path in parts.paths([4], beside=True):
        path.unlink()
    assert parts.look() == 4
    assert parts.look(here=[4]) == NUM
    assert parts.look(least=2) == 2, "more than the engine has"
    assert parts.look(least=4) == 0
    assert parts.look(most=3, here=[4]) == 3
    for path in parts.paths([2], beside=False):
        path.unlink()
    assert parts.look(here=[4]) == 2


def test_a_part_may_come_from_a_peer(parts: Parts) -> None:
    parts.give_to_peers([4, 5], beside=False)
    parts.give_to_peers([2, 5], beside=True)
    assert parts.look() == NUM
    assert parts.fetch(NUM, [2, 3, 4, 5]) == NUM + 4
    for cache, host in zip(parts.cache, parts.host, strict=True):
        assert np.array_equal(host[:NUM], cache[parts.blocks])
        assert np.array_equal(host[20:28], cache[parts.beside[2] : parts.beside[2] + 8])


def test_what_a_peer_has_lost_ends_what_has_come(parts: Parts) -> None:
    parts.give_to_peers([2, 5], beside=True)
    parts.peers.blocks.clear()
    assert parts.fetch(NUM, [2, 3, 4, 5]) == NUM
    assert parts.fetch(NUM, [3, 4, 5]) == NUM + 2


def test_peers_are_asked_a_few_times_only(parts: Parts) -> None:
    for path in parts.paths([1, 3, 5], beside=True):
        path.unlink()
    assert parts.look() == 1, "behind that every window lacks a block"
    assert parts.peers.num_questions == 3
    for path in parts.paths([0, 2, 4], beside=True):
        path.unlink()
    assert parts.look() == 0
    assert parts.peers.num_questions == 3 + 4


@pytest.mark.parametrize("event", ["evicted", "beside another", "evicted and back"])
def test_what_was_given_away_before_it_was_written_is_not_written(tmp_path: Path, event: str) -> None:
    parts = Parts(tmp_path / "kv")
    parts.leave()
    if event == "evicted":
        parts.pages.beside[0].forget_pages(parts.beside[[1]] // PAGE)
    elif event == "beside another":
        parts.pages.beside[0].owner[parts.beside[1] // PAGE] = parts.blocks[2]
    else:
        parts.evictions[parts.beside[1]] += 1
    parts.save()
    exist = [path.exists() for path in parts.paths(range(NUM), beside=True)]
    assert exist == [place != 1 for place in range(NUM)]
    assert all(path.exists() for path in parts.paths(range(NUM), beside=False))


def test_blocks_on_the_host_are_written_under_the_names_that_were_left(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "kv")
    order = Store(3, np.array([30, 31, 33, 35], np.int32), np.array([101, 777]), is_beside=True)
    assert parts.store.carry_out(order) == BlocksStored(3, 0), "nobody has left these contents"
    parts.leave()
    parts.save()
    for path in parts.paths(range(NUM), beside=True):
        path.unlink()
    assert parts.store.carry_out(order) == BlocksStored(3, 1)
    assert [path.exists() for path in parts.paths(range(NUM), beside=True)] == [place == 1 for place in range(NUM)]
