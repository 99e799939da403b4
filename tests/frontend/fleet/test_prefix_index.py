"""PrefixIndex against plain sets fed with the same events, and against an engine's own prefix cache."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from core.kv.block_names import hash_blocks
from frontend.fleet.prefix_index import _FEW_BLOCKS, PrefixIndex, _Blocks
from ipc.wire.block_roots import PLAIN_ROOT, root_of_salt
from ipc.wire.kv_events import KVBlocksCleared, KVBlocksRemoved, KVBlocksStored
from tests.frontend.fleet.stand import CONFIG, Stand

SIZE = 4


def stored(blocks: list[tuple[int, int, list[int]]]) -> KVBlocksStored:
    contents, parents, tokens = zip(*blocks, strict=True)
    ids = np.array([token for part in tokens for token in part], "<i4").tobytes()
    return KVBlocksStored(np.array(contents, "<i8").tobytes(), np.array(parents, "<i8").tobytes(), ids, SIZE)


def ids(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


class Oracle:
    """Which beginnings each replica has, as sets of (root, tokens)."""

    def __init__(self) -> None:
        self.cached: dict[int, dict[int, tuple[int, tuple[int, ...]]]] = {}  # replica -> content -> path

    def match(self, root: int, tokens: list[int]) -> dict[int, int]:
        found = {}
        for replica, blocks in self.cached.items():
            paths, depth = set(blocks.values()), 0
            while (depth + 1) * SIZE < len(tokens) and (root, tuple(tokens[: (depth + 1) * SIZE])) in paths:
                depth += 1
            if depth:
                found[replica] = depth * SIZE
        return found


@pytest.mark.parametrize("seed", range(3))
def test_random_events(seed: int) -> None:
    chance, index, oracle = random.Random(seed), PrefixIndex(), Oracle()
    roots = [PLAIN_ROOT, root_of_salt("a"), root_of_salt("", "a"), root_of_salt("b", "a")]
    next_content = dict.fromkeys(range(70), 0)
    for _ in range(500):
        replica = chance.choice([0, 1, 2, 69])
        blocks = oracle.cached.setdefault(replica, {})
        match chance.random():
            case draw if draw < 0.7:
                parent = chance.choice([*blocks, *roots])
                root, path = (parent, ()) if parent < 0 else blocks[parent]
                own = [chance.randrange(3) for _ in range(SIZE)]
                content, next_content[replica] = next_content[replica], next_content[replica] + 1
                if (root, (*path, *own)) not in blocks.values():
                    blocks[content] = (root, (*path, *own))
                    index.apply(replica, [stored([(content, parent, own)])])
            case draw if draw < 0.97 and blocks:
                leaves = [
                    one
                    for one, path in blocks.items()
                    if not any(p[: len(path[1])] == path[1] != p for _, p in blocks.values())
                ]
                content = chance.choice(leaves or list(blocks))
                index.apply(replica, [KVBlocksRemoved(np.array([content], "<i8").tobytes())])
                del blocks[content]
            case draw if draw > 0.994:
                index.apply(replica, [KVBlocksCleared()])
                blocks.clear()
        prompt = [chance.randrange(3) for _ in range(chance.randrange(1, 30))]
        root = chance.choice(roots)
        assert index.match(root, ids(prompt)) == oracle.match(root, prompt)
    for replica in (0, 1, 2, 69):
        assert index.num_blocks(replica) == len(oracle.cached[replica])
        index.forget(replica)
    assert index._by_size[SIZE]._holders == {}


def test_few_blocks_are_looked_up_as_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three replicas have the first 1, 5 and 12 blocks of a prompt; only more than _FEW_BLOCKS need arrays."""
    index, tokens, num_arrays = PrefixIndex(), [random.Random(1).randrange(2**31) for _ in range(13 * SIZE)], 0
    for replica, depth in enumerate([1, 5, 12]):
        blocks = [(at, at - 1 if at else PLAIN_ROOT, tokens[at * SIZE : (at + 1) * SIZE]) for at in range(depth)]
        index.apply(replica, [stored(blocks)])
    keys = _Blocks.keys

    def noted(*arguments: Any) -> list[int]:
        nonlocal num_arrays
        num_arrays += 1
        return keys(*arguments)

    monkeypatch.setattr(_Blocks, "keys", noted)
    for count in range(13):
        prompt = ids(tokens[: count * SIZE + 1])
        expected = {replica: SIZE * min(depth, count) for replica, depth in enumerate([1, 5, 12]) if count}
        assert index.match(PLAIN_ROOT, prompt) == expected
        assert num_arrays == max(0, count - _FEW_BLOCKS)


def test_blocks_of_several_sizes_and_torn_events() -> None:
    index = PrefixIndex()
    index.apply(0, [stored([(1, -1, [1, 2, 3, 4]), (2, 1, [5, 6, 7, 8])])])
    two = KVBlocksStored(np.array([1], "<i8").tobytes(), np.array([-1], "<i8").tobytes(), ids([1, 2]), 2)
    index.apply(1, [two])
    assert index.match(-1, ids([1, 2, 3, 4, 5, 6, 7, 8, 9])) == {0: 8, 1: 2}
    assert index.match(-1, ids([1, 2, 3, 4])) == {1: 2}  # the last token is always computed
    index.apply(0, [stored([(9, 77, [1, 1, 1, 1])])])  # of a parent that nobody knows
    assert index.num_blocks(0) == 2
    with pytest.raises(ValueError, match="2 blocks of 4 tokens with 1 parents"):
        index.apply(0, [KVBlocksStored(bytes(16), bytes(8), bytes(32), 4)])
    with pytest.raises(ValueError, match="blocks of 0 tokens"):
        index.apply(0, [KVBlocksStored(b"", b"", b"", 0)])


def test_the_picture_is_what_the_engines_have() -> None:
    """Compare with each engine's own look-up after every step of a run in which caches are too small."""
    chance = random.Random(3)
    stand = Stand(2, config=msgspec.structs.replace(CONFIG, num_blocks_override=40))
    begins = [[chance.randrange(5, 400) for _ in range(24)] for _ in range(5)]
    for number in range(25):
        prompt = chance.choice(begins)[: chance.randrange(5, 25)] + [chance.randrange(5, 400) for _ in range(3)]
        stand.submit(1, number, prompt, max_tokens=chance.randrange(1, 9), cache_salt=chance.choice(["", "x"]))
        stand.turn(chance.randrange(3))
        stand.exchange()
        for begin in begins:
            for salt in ("", "x"):
                found = stand.fleet.dispatch.index.match(root_of_salt(salt), ids([*begin, 4]))
                for row, replica in stand.fleet.replicas.by_row.items():
                    names = stand.replicas[replica.address].core.scheduler.pool.names
                    whole = np.array(begin, np.int32).reshape(-1, SIZE)
                    blocks, _ = names.find(root_of_salt(salt), whole, hash_blocks(whole).tolist())
                    assert found.get(row, 0) == SIZE * len(blocks)
    stand.run()
