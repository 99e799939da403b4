"""BlockNames: exact names of block contents, however they are entered; a collision costs a hit, nothing else."""

import random

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from core.kv.block_names import UNNAMED, BlockNames, block_key, block_keys, hash_blocks
from core.kv.event_log import KVEventLog
from ipc.tables.arrays import Int32s
from ipc.wire.block_roots import root_of_salt
from ipc.wire.kv_events import KVBlocksCleared, KVBlocksRemoved, KVBlocksStored
from tests.placed import PREFIX

SIZE = 4
ROOT = root_of_salt("")


def ids(*blocks: int) -> Int32s:
    return np.array(blocks, np.int32)


def blocks_of(*firsts: int) -> Int32s:
    """[n, SIZE] tokens, each block by its first."""
    return (np.array(firsts, np.int32)[:, None] + np.arange(SIZE, dtype=np.int32)).astype(np.int32)


def find(names: BlockNames, root: int, tokens: Int32s) -> list[int]:
    found, _ = names.find(root, tokens, hash_blocks(tokens).tolist())
    return found.tolist()


def enter_run(names: BlockNames, blocks: Int32s, tokens: Int32s, parent: int = ROOT) -> int:
    return names.name_run(blocks, parent, tokens, hash_blocks(tokens).tolist())


def enter_one_by_one(names: BlockNames, blocks: Int32s, tokens: Int32s, parent: int = ROOT) -> int:
    for block, token_ids in zip(blocks, tokens, strict=True):
        parent = int(names.name(block[None], np.array([parent]), token_ids[None])[0])
    return parent


PROMPTS = [(10, 20, 30), (10, 20, 40), (50,), (10, 60), (20, 10, 30)]


def test_columns_runs_and_any_order_name_alike() -> None:
    """A trie of prompts entered as runs, block by block, and level by level as columns finds the same blocks."""
    expected = None
    for way in range(8):
        names = BlockNames(20, SIZE)
        rows = [(index, blocks_of(*prompt)) for index, prompt in enumerate(PROMPTS)]
        if way >= 3:
            random.Random(way).shuffle(rows)
        if way == 2:  # one block of each row at a time
            parents = dict.fromkeys(range(len(PROMPTS)), ROOT)
            for level in range(3):
                now = [(index, tokens) for index, tokens in rows if level < len(tokens)]
                blocks = ids(*(3 * index + level + 1 for index, _ in now))
                before = np.array([parents[index] for index, _ in now])
                contents = names.name(blocks, before, np.array([tokens[level] for _, tokens in now]))
                parents.update(zip((index for index, _ in now), contents.tolist(), strict=True))
        for index, tokens in rows if way != 2 else []:
            enter = enter_one_by_one if way % 2 else enter_run
            enter(names, np.arange(3 * index + 1, 3 * index + 1 + len(tokens), dtype=np.int32), tokens)
        names.check_integrity()
        lengths = [[len(find(names, ROOT, blocks_of(*prompt, 99))) for prompt in PROMPTS], len(names)]
        shared = find(names, ROOT, blocks_of(10, 20))
        assert shared == find(names, ROOT, blocks_of(10, 20, 40))[:2]
        expected = expected or lengths
        assert lengths == expected == [[3, 3, 1, 2, 3], 9]


def test_contents_are_equal_exactly_where_all_tokens_are() -> None:
    names = BlockNames(9, SIZE)
    one = enter_run(names, ids(1, 2), blocks_of(10, 20))
    assert enter_run(names, ids(3, 4), blocks_of(10, 20)) == one
    assert enter_run(names, ids(5, 6), blocks_of(11, 20)) != one
    assert names.content[ids(3, 4)].tolist() == [UNNAMED, UNNAMED]  # the first block keeps the name
    assert find(names, ROOT, blocks_of(10, 20, 30)) == [1, 2]


def test_two_rows_of_one_column_with_one_content_share_its_number() -> None:
    names = BlockNames(4, SIZE)
    contents = names.name(ids(2, 1), np.array([ROOT, ROOT]), blocks_of(10, 10))
    assert contents[0] == contents[1]
    assert names.content.tolist() == [0, 0, contents[0], 0]
    names.check_integrity()


@pytest.mark.parametrize("enter", [enter_run, enter_one_by_one])
def test_a_collision_is_never_a_wrong_hit(monkeypatch: pytest.MonkeyPatch, enter: object) -> None:
    def constant(token_ids: Int32s) -> npt.NDArray[np.uint64]:
        return np.zeros(len(token_ids), np.uint64)

    monkeypatch.setattr(f"{PREFIX}core.kv.block_names.hash_blocks", constant)
    assert callable(enter)
    names = BlockNames(9, SIZE)
    prompts = [blocks_of(10, 20), blocks_of(11, 20), blocks_of(10, 21)]
    for index, tokens in enumerate(prompts):
        blocks = ids(2 * index + 1, 2 * index + 2)
        if enter is enter_run:
            names.name_run(blocks, ROOT, tokens, [0, 0])
        else:
            enter(names, blocks, tokens)
        names.check_integrity()
    found = [names.find(ROOT, tokens, [0, 0])[0].tolist() for tokens in prompts]
    assert found[0] == [1, 2]
    assert found[1] == []  # its first block has the key of another
    assert found[2] == [1]


def test_a_collision_of_a_later_block_ends_the_run_before_it() -> None:
    names = BlockNames(9, SIZE)
    enter_run(names, ids(1, 2, 3), blocks_of(10, 20, 30))
    hashes = hash_blocks(blocks_of(10, 20, 30)).tolist()
    found, content = names.find(ROOT, blocks_of(10, 21, 30), hashes)  # the hashes lie
    assert found.tolist() == [1]
    assert content == names.content[1]


def test_salts_are_roots_of_their_own() -> None:
    names = BlockNames(9, SIZE)
    roots = [root_of_salt(salt) for salt in ("", "a", "b", "ab", "a\0", "cache_salt")]
    assert len(set(roots)) == 6
    assert max(roots) == root_of_salt("") == -1  # below every content number
    assert min(roots) >= -(2**63)
    enter_run(names, ids(1), blocks_of(10), roots[1])
    assert [find(names, root, blocks_of(10)) for root in roots[:3]] == [[], [1], []]


def test_names_are_the_same_in_every_process() -> None:
    """A log replays only if nothing of hash() or of the machine is in a name."""
    assert hash_blocks(np.array([[1, 2, 3, 4], [0, 0, 0, 0]], np.int32)).tolist() == [
        17523550852751985378,
        6248336257039152728,
    ]


def test_hashes_depend_on_each_token_and_its_place() -> None:
    rows = np.array([[1, 2, 3, 4], [2, 1, 3, 4], [1, 2, 3, 5], [1, 2, 3, 0], [0, 2, 3, 4], [-1, 2, 3, 4]], np.int32)
    assert len(set(hash_blocks(rows).tolist())) == 6


def test_what_is_forgotten_is_not_found_and_may_be_named_again() -> None:
    names = BlockNames(9, SIZE)
    content = enter_run(names, ids(1, 2, 3), blocks_of(10, 20, 30))
    names.forget(ids(2))
    names.check_integrity()
    assert find(names, ROOT, blocks_of(10, 20, 30)) == [1]
    assert enter_run(names, ids(4), blocks_of(20), int(names.content[1])) != content
    assert find(names, ROOT, blocks_of(10, 20, 30)) == [1, 4]  # 3 follows a content that is no more
    names.forget_all()
    names.check_integrity()
    assert (len(names), find(names, ROOT, blocks_of(10))) == (0, [])


def test_a_router_can_follow_the_events() -> None:
    names = BlockNames(9, SIZE)
    names.events = KVEventLog(SIZE)
    enter_run(names, ids(1, 2), blocks_of(10, 20))
    names.name(ids(3, 4), np.array([ROOT, ROOT]), blocks_of(10, 30))  # 3 holds what is stored already
    names.forget(ids(2))
    names.forget_all()
    events = names.events.drain()
    assert names.events.drain() == []
    known: dict[int, tuple[int, list[int]]] = {}
    for event in events[:-2]:
        assert isinstance(event, KVBlocksStored)
        assert event.block_size == SIZE
        contents, parents = np.frombuffer(event.contents, "<i8").tolist(), np.frombuffer(event.parents, "<i8").tolist()
        tokens = np.frombuffer(event.token_ids, "<i4").reshape(-1, SIZE).tolist()
        known.update(zip(contents, zip(parents, tokens, strict=True), strict=True))
    first, second, third = sorted(known)
    assert known == {first: (-1, [10, 11, 12, 13]), second: (first, [20, 21, 22, 23]), third: (-1, [30, 31, 32, 33])}
    assert events[-2] == KVBlocksRemoved(np.array([second], "<i8").tobytes())
    assert events[-1] == KVBlocksCleared()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(events[-2]), type=KVBlocksRemoved) == events[-2]


def test_a_column_of_keys_is_those_of_its_blocks() -> None:
    """Contents of roots are negative: as numbers and as columns they wrap alike."""
    parents, tokens = np.array([ROOT, root_of_salt("salt"), 1, 2**40]), blocks_of(5, 5, 5, 2**31 - 9)
    hashes = hash_blocks(tokens)
    keys = block_keys(parents.view(np.uint64), hashes)
    assert keys.tolist() == list(map(block_key, parents.tolist(), hashes.tolist()))
    assert len(set(keys.tolist())) == 4
