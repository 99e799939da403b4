"""Requests that have KV blocks in common: the C kernel reads these once for several of them, and no bit changes."""

import numpy as np
import pytest
import torch

import kernels.cpu.attention_plan
from kernels.cpu.attention_plan import MAX_SHARED_ROWS, TILE, AttentionPlanner
from kernels.cpu.build import usable_variants
from kernels.cpu.library import load_cpu_library
from kernels.rounding import ceil_div
from tests.kernels.attention_bench import DTYPES
from tests.kernels.attention_reference import first_seen
from tests.kernels.cpu.test_attention import HEADS, CpuBench, attention_of, library

#: Tokens of each context, and how many of its first ones are also those of which other one.
LENGTHS = (1600, 1570, 1300, 1700, 700, 90, 1100, 1601, 517, 512)
SHARED = {1: (1552, 0), 2: (1024, 0), 3: (512, 0), 5: (64, 4), 6: (512, 3), 7: (1280, 2), 8: (512, 3), 9: (448, 4)}
PREFILLED = 6  # still has a part of its prompt to compute when the others decode
STEPS = 4


class SharingBench(CpuBench):
    """Contexts of LENGTHS with SHARED tokens; shares: in the same blocks, as far as these are full."""

    def __init__(self, heads, dtype, *, shares, block_size=16, window=None):
        super().__init__(LENGTHS, heads, dtype, 0, block_size, window)
        self.num_members = 0
        self.first = [0] * len(LENGTHS)  # token that a context computes itself
        for index, (count, other) in SHARED.items():
            self.kv[index][:count] = self.kv[other][:count]
            if shares:
                num_blocks = count // block_size
                self.tables[index, :num_blocks] = self.tables[other, :num_blocks]
                self.first[index] = num_blocks * block_size

    def work(self, num_tokens, context_lens, tables):
        plan = super().work(num_tokens, context_lens, tables)
        self.num_members = len(plan.members)
        return plan

    def prefill(self, index):
        """Store K and V of all tokens but the last ones. What these tokens attend to is not looked at."""
        self.done[index] = self.first[index]
        end = LENGTHS[index] - (300 if index == PREFILLED else STEPS)
        self.step({index: end - self.done[index]}, lambda q, *_: q)

    def decode_all(self, attention):
        """The last tokens of all contexts, computed together; [contexts, tokens, H * D]."""
        for index in range(len(LENGTHS)):
            self.prefill(index)
        steps = []
        for number in range(STEPS):
            counts = {index: 75 if index == PREFILLED else 1 for index in range(len(LENGTHS))}
            steps.append(self.step(dict(sorted(counts.items(), key=lambda item: item[0] * 7 % 10)), attention))
            assert self.num_members > 0, number
        return [torch.cat([step[index] for step in steps]) for index in range(len(LENGTHS))]

    def decode_alone(self, attention):
        """The same, one context after the other."""
        outputs = []
        for index in range(len(LENGTHS)):
            self.prefill(index)
            count = 75 if index == PREFILLED else 1
            outputs.append(torch.cat([self.step({index: count}, attention)[index] for _ in range(STEPS)]))
            assert self.num_members == 0
        return outputs


def compare(attention, heads, dtype, threads=(2,), **kinds):
    usual = SharingBench(heads, dtype, shares=False, **kinds).decode_alone(attention)
    for num_threads in threads:
        attention.library.start_threads(num_threads)
        outputs = SharingBench(heads, dtype, shares=True, **kinds).decode_all(attention)
        attention.library.stop_threads()
        for index, (output, expected) in enumerate(zip(outputs, usual, strict=True)):
            assert expected.isfinite().all()
            assert torch.equal(output, expected), index


def in_turn(values, soaked=()):
    """Each value with one of the dtypes; the other pairs and all of `soaked` are the soak's."""
    return [
        pytest.param(value, dtype, marks=[pytest.mark.soak] if value in soaked or (row + column) % 2 else [])
        for row, value in enumerate((*values, *soaked))
        for column, dtype in enumerate(DTYPES)
    ]


@pytest.mark.parametrize(("variant", "dtype"), in_turn(usable_variants()), ids=str)
def test_bits_are_those_of_a_request_alone(variant, dtype):
    compare(
        attention_of(load_cpu_library(variant)), (6, 2, 20), dtype, threads=(1, 2) if dtype == torch.float32 else (2,)
    )


@pytest.mark.parametrize(("heads", "dtype"), in_turn([(4, 4, 16), (9, 1, 16)], [(9, 3, 64), (14, 2, 32)]), ids=str)
def test_groups_of_heads_change_no_bit(heads, dtype, c_library):
    assert heads in HEADS or heads[0] // heads[1] in (1, 7, 9)
    compare(attention_of(c_library), heads, dtype)


@pytest.mark.parametrize("block_size", [1, 8, 64, *(pytest.param(size, marks=pytest.mark.soak) for size in (4, 32))])
def test_block_sizes_change_no_bit(block_size, c_library):
    compare(attention_of(c_library), (6, 2, 16), torch.bfloat16, block_size=block_size)


@pytest.mark.parametrize(("window", "dtype"), in_turn([1090, 5000], [1200]), ids=str)
def test_windows_change_no_bit(window, dtype, c_library):
    compare(attention_of(c_library), (6, 2, 16), dtype, window=window)


@pytest.mark.parametrize("rows", [6, 9, 1000])
def test_sizes_of_items_change_no_bit(rows, c_library, monkeypatch):
    monkeypatch.setattr(kernels.cpu.attention_plan, "MAX_SHARED_ROWS", rows)
    compare(attention_of(c_library), (6, 2, 16), torch.bfloat16)


def plan_of(lengths, tables, *, heads=(9, 3), counts=None, block_size=16, window=None):
    counts = np.ones(len(lengths), int) if counts is None else np.array(counts)
    return AttentionPlanner(library(), *heads)(counts, np.array(lengths), tables, block_size, window)


def own_tables(num_requests, length, block_size=16):
    width = ceil_div(length, block_size)
    return np.arange(1, num_requests * width + 1, dtype=np.int32).reshape(num_requests, width)


@pytest.mark.parametrize("num_tiles", [1, 3])
@pytest.mark.parametrize("num_requests", [1, 2, 8, 9, 33])
def test_a_tile_in_common_is_one_item_for_as_many_as_may_be_in_one(num_requests, num_tiles, c_library):
    tables = own_tables(num_requests, 2000)
    tables[:, : num_tiles * TILE // 16] = tables[0, : num_tiles * TILE // 16]
    plan = plan_of([2000] * num_requests, tables)
    most = MAX_SHARED_ROWS // 3
    shared = plan.items[plan.items[:, 8] >= 0]
    if num_requests == 1:
        assert len(shared) == len(plan.members) == 0
    else:
        assert len(shared) == 3 * num_tiles * ceil_div(num_requests, most)
        assert shared[:, 3].max() <= most
        assert shared[:, 3].max() - shared[:, 3].min() <= 1
        assert len(plan.members) == 3 * num_tiles * num_requests
    assert len(plan.items) - len(shared) == 3 * num_requests * (4 - num_tiles * (num_requests > 1))
    assert plan.max_item_tokens == plan.items[:, 3].max()


def test_sharing_can_be_off(c_library):
    """Then each request has the items that it has alone, whose bits are those of shared ones."""
    tables = own_tables(3, 2000)
    tables[:, :64] = tables[0, :64]
    columns = np.ones(3, int), np.full(3, 2000)
    shared, off = (AttentionPlanner(c_library, 9, 3, shares_blocks=shares)(*columns, tables, 16) for shares in (1, 0))
    alone = plan_of([2000], tables[:1])
    assert len(shared.members) == 18
    assert len(off.members) == 0
    assert len(off.items) == 3 * len(alone.items)
    assert (off.items[:, 8] < 0).all()


def test_only_equal_blocks_at_the_same_place_are_shared(c_library):
    def num_shared(change):
        tables = own_tables(3, 2000)
        tables[:, :32] = tables[0, :32]
        change(tables)
        return len(plan_of([2000] * 3, tables).members)

    def exchange(tables):  # the tile is another one's second
        tables[1, 32:64], tables[1, :32] = tables[1, :32].copy(), tables[1, 32:64].copy()

    def set_block(place, request):
        def change(tables):
            tables[request, place] = 7777

        return change

    assert num_shared(lambda tables: None) == 9
    assert num_shared(exchange) == 6
    for place in (0, 15, 30, 31):
        assert num_shared(set_block(place, 1)) == 6
    assert num_shared(set_block(0, 0)) == 0  # tiles are compared with the first one that ends in the same block only
    assert num_shared(set_block(31, 0)) == 6
    assert num_shared(set_block(32, 0)) == 9


def test_rows_that_do_not_see_a_whole_tile_do_not_share_it(c_library):
    tables = np.tile(own_tables(1, 2048), (4, 1))

    def members(lengths, **kinds):
        return len(plan_of(lengths, tables, **kinds).members) // 3

    assert members([512] * 4) == members([511] * 4) == 0  # a context of one tile is not split
    assert members([513, 513, 512, 511]) == 2
    assert members([1024, 1023, 1024, 1025]) == 4 + 3
    assert members([2000] * 4, counts=[1, 2, 1, 512]) == 2 * 3
    assert members([2000] * 4, window=2000) == 4 * 3
    assert members([2000, 2000, 1999, 1999], window=1999) == 4 * 2 + 2
    assert members([2000] * 4, window=400) == 0


@pytest.mark.parametrize("window", [None, 700, 1100])
def test_every_row_sees_what_it_should_once(window, c_library):
    lengths = np.array([1300, 1600, 1590, 600, 2000, 1590, 40])
    counts = np.array([1, 1, 1, 1, 90, 1, 1])
    tables = own_tables(7, 2000)
    tables[:6, :32], tables[1:3, 32:70], tables[5, 32:96] = tables[0, :32], tables[0, 32:70], tables[4, 32:96]
    plan = plan_of(lengths, tables, counts=counts, window=window)
    work = plan.items[:, 3] * (plan.items[:, 6] - plan.items[:, 5])
    assert (work[1:] <= work[:-1] * 9 / 8).all()
    first = np.cumsum(counts) - counts
    parts = {(m[0], m[1], m[3] + i * m[2] * 3): i for m in plan.merges.tolist() for i in range(m[4])}
    seen = np.zeros((3, int(counts.sum()), 2000), int)
    written = []
    for request, head, token, count, position, begin, end, partial, members, _ in plan.items.tolist():
        if members < 0:
            seen[head, token : token + count, begin:end] += 1
            written += range(partial, partial + count * 3) if partial >= 0 else ()
            continue
        assert (end - begin, position) == (TILE, end - 1)
        for one, place in plan.members[members : members + count].tolist():
            seen[head, one, begin:end] += 1
            other = int(np.flatnonzero(first == one)[0])
            assert (tables[other, begin // 16 : end // 16] == tables[request, begin // 16 : end // 16]).all()
            assert (head, one, place) in parts
            written += range(place, place + 3)
    assert seen.max() == 1
    assert sorted(written) == list(range(plan.num_partials))
    for index, length in enumerate(lengths.tolist()):
        for i in range(counts[index]):
            position = length - int(counts[index]) + i
            assert seen[:, first[index] + i, first_seen(plan.window, position) : position + 1].all()


def test_tables_that_end_early_are_not_read_beyond(c_library):
    """What a tile's last token has no block for is nobody's to share."""
    tables = np.ones((2, 32), np.int32)
    assert len(plan_of([1024, 1024], tables).members) == 3 * 2
