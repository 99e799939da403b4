"""BlockPool: the order in which blocks go out, are forgotten and come back; then all of it against a plain model."""

import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from core.kv.block_names import hash_blocks
from core.kv.block_pool import NULL_BLOCK, BlockPool
from ipc.tables.arrays import Int32s
from ipc.wire.block_roots import PLAIN_ROOT


def ids(*blocks: int) -> Int32s:
    return np.array(blocks, np.int32)


def name(pool: BlockPool, block: int, content: int) -> None:
    """Blocks are of one token here: its content."""
    pool.names.name(ids(block), np.array([PLAIN_ROOT]), ids(content)[:, None])


def find(pool: BlockPool, contents: list[int]) -> Int32s:
    """The blocks that hold these contents, up to the first that none does."""
    blocks: list[int] = []
    for content in contents:
        tokens = ids(content)[:, None]
        found, _ = pool.names.find(PLAIN_ROOT, tokens, hash_blocks(tokens).tolist())
        if not len(found):
            break
        blocks += found.tolist()
    return ids(*blocks)


def name_all(pool: BlockPool, blocks: Int32s) -> list[int]:
    """Each block is named after itself."""
    contents: list[int] = blocks.tolist()
    for block in contents:
        name(pool, block, block)
    return contents


def full_pool_freed(num_blocks: int) -> tuple[BlockPool, list[int]]:
    """All blocks named and freed, so that block 1 is the least recently used."""
    pool = BlockPool(num_blocks, 1)
    contents = name_all(pool, blocks := pool.allocate(num_blocks - 1))
    pool.free(blocks, None)
    return pool, contents


def test_new_pool_hands_out_ascending_blocks_and_never_the_null_block() -> None:
    pool = BlockPool(6, 1)
    assert pool.num_free == 5
    assert pool.allocate(2).tolist() == [1, 2]
    assert pool.allocate(3).tolist() == [3, 4, 5]
    assert pool.num_free == 0
    assert pool.ref_count.tolist() == [1] * 6
    pool.check_integrity([ids(1, 2, 3, 4, 5)])


def test_allocating_nothing_changes_nothing() -> None:
    pool = BlockPool(3, 1)
    assert pool.allocate(0).tolist() == []
    assert pool.num_free == 2
    pool.check_integrity([])


def test_allocating_more_than_free_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="3 blocks requested, 2 free"):
        BlockPool(3, 1).allocate(3)


def test_freed_twice_is_a_broken_invariant() -> None:
    pool = BlockPool(4, 1)
    blocks = pool.allocate(1)
    pool.free(blocks, None)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks, None)


def test_eviction_is_least_recently_freed_first_and_a_tail_goes_before_its_prefix() -> None:
    pool = BlockPool(7, 1)
    first, second = pool.allocate(3), pool.allocate(3)
    name_all(pool, first)
    name_all(pool, second)
    pool.free(second[::-1], None)
    pool.free(first[::-1], None)
    assert pool.allocate(6).tolist() == [6, 5, 4, 3, 2, 1]


def test_eviction_forgets_the_name_of_the_block_it_takes_and_no_other() -> None:
    pool, contents = full_pool_freed(5)
    assert pool.allocate(2).tolist() == [1, 2]
    assert find(pool, [contents[0]]).tolist() == []
    assert find(pool, [contents[1]]).tolist() == []
    assert find(pool, contents[2:]).tolist() == [3, 4]
    assert len(pool.names) == 2
    pool.check_integrity([ids(1, 2)])


def test_blank_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(5, 1)
    named, blank = pool.allocate(2), pool.allocate(2)
    name_all(pool, named)
    pool.free(named, None)
    pool.free(blank, None)  # freed last and still taken first
    assert sorted(pool.allocate(2).tolist()) == [3, 4]
    assert pool.allocate(2).tolist() == [1, 2]


def test_find_stops_at_the_first_unknown_content() -> None:
    pool, contents = full_pool_freed(5)
    assert find(pool, [contents[0], 10**6, contents[1]]).tolist() == [1]
    assert find(pool, []).tolist() == []


def test_hits_leave_the_free_list_and_are_not_evicted_by_the_allocation_after_them() -> None:
    pool, contents = full_pool_freed(6)
    hits = find(pool, [contents[0], contents[2]])
    assert pool.num_revived(hits) == 2
    pool.hold(hits)
    assert pool.num_free == 3
    assert pool.allocate(3).tolist() == [2, 4, 5]
    assert find(pool, [contents[0]]).tolist() == [1]
    pool.check_integrity([hits, ids(2, 4, 5)])


def test_a_revived_block_is_the_most_recently_used_when_freed_again() -> None:
    pool, contents = full_pool_freed(5)
    hits = find(pool, contents[:1])
    pool.hold(hits)
    pool.free(hits, None)
    assert pool.allocate(4).tolist() == [2, 3, 4, 1]


def test_a_shared_block_is_free_only_after_its_last_owner() -> None:
    pool = BlockPool(4, 1)
    blocks = pool.allocate(1)
    name_all(pool, blocks)
    pool.hold(blocks)
    pool.check_integrity([blocks, blocks])
    pool.free(blocks, None)
    assert pool.num_free == 2
    assert pool.num_revived(blocks) == 0
    pool.free(blocks, None)
    assert pool.num_free == 3


def test_the_first_block_of_a_content_keeps_the_name() -> None:
    pool = BlockPool(4, 1)
    first, second = pool.allocate(1), pool.allocate(1)
    name(pool, int(first[0]), 77)
    name(pool, int(second[0]), 77)
    assert find(pool, [77]).tolist() == first.tolist()
    pool.free(second, None)  # blank, for it has no name
    pool.free(first, None)
    pool.check_integrity([])
    assert pool.allocate(2).tolist() == [2, 3]


def test_fenced_blocks_are_free_after_the_update_of_their_step() -> None:
    pool = BlockPool(6, 1)
    early, late = pool.allocate(2), pool.allocate(3)
    name_all(pool, early)
    pool.free(early, 7)
    pool.free(late, 8)
    assert (pool.num_free, pool.num_fenced) == (0, 5)
    pool.check_integrity([])
    pool.lift_fences(6)
    assert pool.num_free == 0
    pool.lift_fences(7)
    assert (pool.num_free, pool.num_fenced) == (2, 3)
    pool.lift_fences(8)
    assert (pool.num_free, pool.num_fenced) == (5, 0)
    pool.check_integrity([])


def test_a_fenced_block_can_be_found_and_held_and_its_fence_is_gone() -> None:
    pool = BlockPool(4, 1)
    blocks = pool.allocate(2)
    contents = name_all(pool, blocks)
    pool.free(blocks, 3)
    hits = find(pool, contents[:1])
    assert pool.num_revived(hits) == 0  # it is not among the free ones that num_free counts
    pool.hold(hits)
    assert pool.num_fenced == 1
    pool.lift_fences(3)
    assert (pool.num_free, pool.num_fenced) == (2, 0)
    pool.check_integrity([hits])


@pytest.mark.parametrize("second_fence", [3, 4])
def test_a_block_fenced_twice_comes_free_once_and_not_too_early(second_fence: int) -> None:
    pool = BlockPool(4, 1)
    blocks = pool.allocate(1)
    contents = name_all(pool, blocks)
    pool.free(blocks, 3)
    pool.hold(find(pool, contents))
    pool.free(blocks, second_fence)
    assert pool.num_fenced == 1
    pool.lift_fences(3)
    assert pool.num_free == (3 if second_fence == 3 else 2)
    pool.lift_fences(4)
    assert (pool.num_free, pool.num_fenced) == (3, 0)
    pool.check_integrity([])


def test_forget_leaves_nothing_to_find_and_loses_no_block() -> None:
    pool = BlockPool(7, 1)
    free, held, fenced = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    contents = name_all(pool, np.concatenate([free, held, fenced]))
    pool.free(free, None)
    pool.free(fenced, 1)
    pool.forget()
    assert len(pool.names) == 0
    assert all(len(find(pool, [one])) == 0 for one in contents)
    pool.check_integrity([held])
    name(pool, int(held[0]), 78)
    pool.lift_fences(1)
    pool.free(held, None)
    pool.check_integrity([])
    assert pool.num_free == 6


def test_forget_names_touches_these_blocks_only() -> None:
    pool = BlockPool(6, 1)
    blocks = pool.allocate(4)
    contents = name_all(pool, blocks[:3])  # the last has no name
    pool.forget_names(blocks[1:])
    assert find(pool, contents[:1]).tolist() == [1]
    assert find(pool, contents[1:]).tolist() == []
    pool.check_integrity([blocks])
    pool.free(blocks, None)
    pool.check_integrity([])


def test_the_least_urgent_are_forgotten_first_and_of_them_the_oldest() -> None:
    pool = BlockPool(8, 1, num_rings=3)
    blocks = pool.allocate(7)
    contents = name_all(pool, blocks)
    pool.urgency[blocks] = [1, 2, 0, 1, 0, 2, 1]
    pool.free(blocks, None)
    pool.check_integrity([])
    hits = find(pool, contents[2:3])
    assert pool.num_revived(hits) == 1
    pool.hold(hits)
    pool.urgency[hits] = 2  # its last user now
    pool.free(hits, None)
    assert [pool.allocate(1).item() for _ in range(7)] == [blocks[at] for at in (4, 0, 3, 6, 1, 5, 2)]
    pool.check_integrity([blocks])


def test_the_ring_stays_in_order_and_in_bounds_over_long_churn() -> None:
    pool, contents = full_pool_freed(9)

    def churn(num_turns: int) -> list[int]:
        """Revive and free one block again and again: stale entries pile up. Return the last blocks that were freed."""
        for turn in range(num_turns):
            hits = find(pool, [contents[turn % 3]])
            pool.hold(hits)
            pool.free(hits, None)
        return [turn % 3 + 1 for turn in range(num_turns - 3, num_turns)]

    churn(100)
    tracemalloc.start()
    order = churn(1000)
    assert tracemalloc.get_traced_memory()[0] < 4000  # an entry for each turn would take 8,000
    tracemalloc.stop()
    pool.check_integrity([])
    assert pool.allocate(8).tolist() == [4, 5, 6, 7, 8, *order]


class PoolMachine(RuleBasedStateMachine):
    """The pool against dicts and lists. Tables are lists of blocks, as rows have them."""

    num_blocks = 9

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.num_blocks, 1)
        self.tables: list[list[int]] = []
        self.names: dict[int, int] = {}
        self.blank = set(range(1, self.num_blocks))
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self.fences: list[tuple[int, list[int]]] = []  # a block's only valid fence is the last one it is in
        self.fence_of: dict[int, int] = {}
        self.step = 0
        self.num_names = 0

    def _free_now(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.names:
                self.cached[block] = None
            else:
                self.blank.add(block)

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        count = min(count, self.pool.num_free)
        blocks = self.pool.allocate(count).tolist()
        from_blank = min(count, len(self.blank))
        assert set(blocks[:from_blank]) <= self.blank
        assert blocks[from_blank:] == list(self.cached)[: count - from_blank]
        self.blank -= set(blocks[:from_blank])
        for block in blocks[from_blank:]:
            del self.cached[block], self.names[block]
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), fresh=st.booleans())
    def remember(self, data: st.DataObject, fresh: bool) -> None:
        table = data.draw(st.sampled_from(self.tables))
        unnamed = [block for block in table if block not in self.names]
        if not unnamed:
            return
        if fresh or not self.names:
            self.num_names += 1
            name_of = 100 + self.num_names
            self.names[unnamed[0]] = name_of
        else:
            name_of = data.draw(st.sampled_from(sorted(self.names.values())))  # taken: the first block keeps it
        name(self.pool, unnamed[0], name_of)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        known = {name: block for block, name in self.names.items()}
        wanted = data.draw(st.lists(st.sampled_from(sorted(known)), min_size=1, unique=True))
        hits = find(self.pool, [*wanted, 10**6, *wanted])
        assert hits.tolist() == [known[name] for name in wanted]
        assert self.pool.num_revived(hits) == sum(block in self.cached for block in hits.tolist())
        self.pool.hold(hits)
        for block in hits.tolist():
            self.cached.pop(block, None)
            self.fence_of.pop(block, None)
        self.tables.append(hits.tolist())

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), in_flight=st.booleans())
    def free(self, data: st.DataObject, in_flight: bool) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.step += in_flight
        self.pool.free(ids(*table[::-1]), self.step if in_flight else None)
        held = {block for other in self.tables for block in other}
        released = [block for block in reversed(table) if block not in held]
        if in_flight:
            self.fences.append((self.step, released))
            self.fence_of.update(dict.fromkeys(released, self.step))
        else:
            self._free_now(released)

    @precondition(lambda self: self.fences)
    @rule()
    def lift(self) -> None:
        step, blocks = self.fences.pop(0)
        self.pool.lift_fences(step)
        lifted = [block for block in blocks if self.fence_of.get(block) == step]
        for block in lifted:
            del self.fence_of[block]
        self._free_now(lifted)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.names.clear()
        self.blank |= set(self.cached)
        self.cached.clear()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget_names(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.forget_names(ids(*table))
        for block in table:
            self.names.pop(block, None)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity([ids(*table) for table in self.tables])
        assert self.pool.num_free == len(self.blank) + len(self.cached)
        assert self.pool.num_fenced == len(self.fence_of)
        assert len(self.pool.names) == len(self.names)
        assert self.pool.ref_count[NULL_BLOCK] == 1


def test_pool_agrees_with_a_plain_model() -> None:
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(max_examples=150, stateful_step_count=40, derandomize=True, deadline=None, database=None),
    )
