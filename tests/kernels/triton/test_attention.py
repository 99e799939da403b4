"""Triton's attention equals the float64 oracle: shuffled tables, poisoned caches, padding, any chunking and batch."""

from copy import copy
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import pytest
import torch

from kernels.rounding import ceil_div
from kernels.torch.attention import attention_metadata
from kernels.torch.kv_cache import TorchKVCache
from kernels.torch.tensors import element_type
from kernels.triton import attention_work
from kernels.triton import decode_attention as decode
from kernels.triton import prefill_attention as prefill
from kernels.triton import shared_prefix as prefix
from kernels.triton.attention_work import (
    SPLIT,
    TritonWork,
    last_seen,
    shared_tokens,
    tile_tokens,
    triton_work,
    work_columns,
)
from kernels.triton.decode_attention import decode_attention
from kernels.triton.prefill_attention import prefill_attention
from tests.kernels.attention_reference import reference_attention
from tests.triton_device import ANYWHERE, DEVICE

pytestmark = ANYWHERE

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SCALE = 0.3


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None = None


class Batch(NamedTuple):
    q: torch.Tensor
    cache: TorchKVCache
    num_tokens: np.ndarray
    context_lens: np.ndarray
    tables: np.ndarray


def batch(shape: Shape, requests: list[tuple[int, int]], dtype: torch.dtype, seed: int = 0) -> Batch:
    """requests: (tokens computed, tokens of context). Blocks are shuffled; what no request wrote is NaN."""
    rng = np.random.default_rng(seed)
    counts, lengths = (np.array(column, np.int64) for column in zip(*requests, strict=True))
    size = shape.block_size
    needed = ceil_div(lengths, size)
    blocks = rng.permutation(int(needed.sum())) + 1
    tables = rng.integers(0, 2**30, (len(requests), int(needed.max()) + 1)).astype(np.int32)  # ids of no block
    cache = TorchKVCache(
        1, int(needed.sum()) + 1, size, shape.kv_heads, head_dim=shape.head_dim, dtype=element_type(dtype)
    )
    cache.layers[0].fill_(torch.nan)
    numbers = torch.from_numpy(rng.standard_normal((int(lengths.sum()), 2, shape.kv_heads, shape.head_dim))).to(dtype)
    done, used = 0, 0
    for index, length in enumerate(lengths.tolist()):
        tables[index, : needed[index]] = blocks[used : used + needed[index]]
        used += int(needed[index])
        at = np.arange(length)
        block, offset = torch.from_numpy(tables[index, at // size].astype(np.int64)), torch.from_numpy(at % size)
        cache.layers[0][block, :, :, offset] = numbers[done : done + length]
        done += length
    q = torch.from_numpy(rng.standard_normal((int(counts.sum()), shape.heads, shape.head_dim))).to(dtype)
    return Batch(q, cache, counts, lengths, tables)


def work_of(shape: Shape, given: Batch) -> TritonWork:
    group = shape.heads // shape.kv_heads
    columns = given.num_tokens, given.context_lens, given.tables
    return triton_work(*columns, group, DEVICE, shape.window)


def attend(
    shape: Shape,
    given: Batch,
    work: TritonWork | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    work = work_of(shape, given) if work is None else work
    q, cache = given.q.to(DEVICE), copy(given.cache)
    cache.layers = [layer.to(DEVICE) for layer in given.cache.layers]
    out = torch.full_like(q, torch.nan)
    options = soft_cap, None if sinks is None else sinks.to(DEVICE)
    prefill_attention(q, cache, 0, work, SCALE, out, *options)
    decode_attention(q, cache, 0, work, SCALE, out, *options)
    return out.cpu()


def expected(shape: Shape, given: Batch, sinks: torch.Tensor | None = None) -> torch.Tensor:
    tables = np.where(given.tables < given.cache.num_blocks, given.tables, 0)
    metadata = attention_metadata(given.num_tokens, given.context_lens, tables, given.cache, shape.window)
    return reference_attention(given.q, given.cache, 0, metadata, SCALE, sinks).view(given.q.shape)


MIXED = [(1, 1), (5, 5), (1, 70), (23, 40), (1, 16)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 2, 16, 16),
        Shape(6, 2, 20, 16),
        Shape(4, 1, 80, 32, 9),
        Shape(8, 1, 128, 64),
        Shape(3, 1, 64, 16, 17),
    ],
    ids=lambda shape: f"{shape.heads}of{shape.kv_heads}x{shape.head_dim}b{shape.block_size}w{shape.window}",
)
def test_equals_the_oracle(shape: Shape, dtype: torch.dtype) -> None:
    given = batch(shape, MIXED, dtype)
    got = attend(shape, given).double()
    torch.testing.assert_close(got, expected(shape, given), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 130, 300])
def test_a_long_context_is_split_and_merged(window: int | None) -> None:
    shape = Shape(3, 1, 16, 16, window)
    given = batch(shape, [(1, 2 * SPLIT + 1), (1, 40), (1, SPLIT)], torch.float32)
    assert work_of(shape, given).num_splits == 3
    torch.testing.assert_close(attend(shape, given).double(), expected(shape, given), rtol=2e-5, atol=2e-5)


def test_soft_cap() -> None:
    shape, cap = Shape(2, 1, 16, 16), 2.0
    given = batch(shape, [(1, 20), (4, 9)], torch.float32)
    got = attend(shape, given, soft_cap=cap).double()
    token = 0
    for index, (count, length) in enumerate(zip(given.num_tokens.tolist(), given.context_lens.tolist(), strict=True)):
        blocks = torch.from_numpy(given.tables[index, : ceil_div(length, 16)].astype(np.int64))
        keys = given.cache.keys(0)[blocks].flatten(0, 1)[:length, 0].double()
        values = given.cache.values(0)[blocks].flatten(0, 1)[:length, 0].double()
        for position in range(length - count, length):
            scores = cap * torch.tanh(given.q[token].double() @ keys[: position + 1].T * SCALE / cap)
            want = scores.softmax(-1) @ values[: position + 1]
            torch.testing.assert_close(got[token], want, rtol=2e-5, atol=2e-5)
            token += 1


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sinks(dtype: torch.dtype) -> None:
    """Each head has its own; one is so low that it takes no weight, one so high that it takes nearly all."""
    shape = Shape(6, 2, 20, 16, 9)
    given = batch(shape, MIXED, dtype)
    sinks = torch.tensor([0.5, -200.0, 1.5, -1.0, -torch.inf, 30.0])
    got, want = attend(shape, given, sinks=sinks).double(), expected(shape, given, sinks)
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert (want - expected(shape, given)).abs().amax((0, 2))[[0, 2, 3, 5]].min() > 0.1


@pytest.mark.parametrize("window", [None, 130])
def test_a_long_context_has_its_sinks_once(window: int | None) -> None:
    """With a window, the first split sees nothing."""
    shape = Shape(3, 1, 16, 16, window)
    given, sinks = batch(shape, [(1, 2 * SPLIT + 1), (1, 40), (1, SPLIT)], torch.float32), torch.tensor([0.5, 4.0, 6.0])
    got = attend(shape, given, sinks=sinks)
    torch.testing.assert_close(got.double(), expected(shape, given, sinks), rtol=2e-5, atol=2e-5)
    alone = Batch(given.q[[1]], given.cache, *(column[[1]] for column in given[2:]))
    assert torch.equal(attend(shape, alone, sinks=sinks)[0], got[1])


#: Of a request's tokens, the first of a run that see each other, and their number: side by side, across a tile.
WHOLES = ((3, 9), (12, 1), (13, 40), (60, 7))


def seeing(shape: Shape, given: Batch, first: int) -> TritonWork:
    """The work of a step whose first request begins at this token of its context, with the WHOLES of it."""
    work, count = work_of(shape, given), int(given.num_tokens[0])
    clipped = [(max(at - first, 0), min(at + n - first, count) - max(at - first, 0)) for at, n in WHOLES]
    wholes = np.array([run for run in clipped if run[1] > 0])
    positions = work.positions.cpu().numpy()
    return work._replace(lasts=torch.from_numpy(last_seen(positions, wholes)).to(DEVICE))


def seen_by(shape: Shape, given: Batch) -> torch.Tensor:
    """The first request's attention to what its tokens see, in float64."""
    length = int(given.context_lens[0])
    at = torch.arange(length)
    seen = at <= at[:, None]
    for first, n in WHOLES:
        seen[first : first + n, first : first + n] = True
    if shape.window is not None:
        seen &= at > at[:, None] - shape.window
    blocks = torch.from_numpy(given.tables[0, : ceil_div(length, shape.block_size)].astype(np.int64))
    sides = (given.cache.keys(0), given.cache.values(0))
    keys, values = (side[blocks].flatten(0, 1)[:length].double().transpose(0, 1) for side in sides)
    keys, values = (side.repeat_interleave(shape.heads // shape.kv_heads, 0) for side in (keys, values))
    scores = (given.q[:length].double().transpose(0, 1) @ keys.transpose(1, 2) * SCALE).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_that_see_later_ones(dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits wherever the prompt is cut, but within a run, and next to other requests."""
    for module in (attention_work, decode, prefill):
        monkeypatch.setattr(module, "SPLIT", 64)
    shape, length = Shape(6, 2, 16, 16, window), 70
    given = batch(shape, [(length, length), (5, 9), (1, 40)], dtype)
    got = attend(shape, given, seeing(shape, given, 0))
    torch.testing.assert_close(
        got[:length].double(), seen_by(shape, given), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    plain = attend(shape, given)
    same = [torch.equal(*pair) for pair in zip(got, plain, strict=True)]
    later = {token for first, n in WHOLES for token in range(first, first + n - 1)}  # a run's last one sees no more
    assert same == [token not in later for token in range(len(got))]
    first = 0
    for end in (3, 12, 13, 53, 54, 67, length):
        columns = np.array([end - first]), np.array([end]), given.tables[:1]
        piece = Batch(given.q[first:end], given.cache, *columns)
        assert torch.equal(attend(shape, piece, seeing(shape, piece, first)), got[first:end])
        first = end


def test_padding_is_zero_and_reads_no_table() -> None:
    shape = Shape(2, 1, 16, 16)
    given = batch(shape, [(1, 5), (1, 3)], torch.float32)
    work = work_of(shape, given)
    padded = work._replace(
        rows=torch.tensor([0, 1, -1], dtype=torch.int32, device=DEVICE),
        positions=torch.tensor([4, 2, -1], dtype=torch.int32, device=DEVICE),
        decode_tokens=torch.arange(3, dtype=torch.int32, device=DEVICE),
    )
    q = torch.cat((given.q, torch.full((1, 2, 16), 3.0)))
    for splits, sinks in product((1, 2), (None, torch.ones(2))):
        out = attend(shape, given._replace(q=q), padded._replace(num_splits=splits), sinks=sinks)
        assert torch.equal(out[:2], attend(shape, given, sinks=sinks))
        assert torch.equal(out[2], torch.zeros(2, 16))


def test_lists_with_padding_and_results_over_the_queries_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a graph of a step with prompts: lists end in -1, and there are splits beyond each context."""
    for module in (attention_work, decode, prefill):
        monkeypatch.setattr(module, "SPLIT", 32)
    shape = Shape(6, 2, 16, 16, 50)
    given = batch(shape, [(1, 70), (9, 20), (1, 3)], torch.bfloat16)
    plain = work_of(shape, given)
    expected, cache = attend(shape, given, plain), copy(given.cache)
    cache.layers = [layer.to(DEVICE) for layer in given.cache.layers]
    none = torch.full((3,), -1, dtype=torch.int32, device=DEVICE)
    lists = ("rows", "positions", "decode_tokens", "tile_tokens", "tile_counts")
    longer = {name: torch.cat((getattr(plain, name), none)) for name in lists}
    work = plain._replace(**longer, num_splits=4)
    queries = torch.cat((given.q, torch.ones(3, 6, 16, dtype=torch.bfloat16))).to(DEVICE)
    prefill_attention(queries, cache, 0, work, SCALE, queries)
    decode_attention(queries, cache, 0, work, SCALE, queries)
    assert torch.equal(queries[:-3].cpu(), expected)
    assert (queries[-3:] == 1).all(), "padding has no result"


@pytest.mark.parametrize("window", [None, 20])
def test_a_row_has_the_same_bits_in_any_batch(window: int | None) -> None:
    """A decode: alone, beside longer requests, in any order and with any number of splits."""
    shape = Shape(6, 2, 16, 16, window)
    given = batch(shape, [(1, SPLIT + 40), (1, 33), (1, 2 * SPLIT + 3)], torch.float32)
    whole = attend(shape, given)
    for index in range(3):
        alone = Batch(given.q[[index]], given.cache, *(column[[index]] for column in given[2:]))
        assert torch.equal(attend(shape, alone)[0], whole[index])
    order = [2, 0, 1]
    turned = Batch(given.q[order], given.cache, *(column[order] for column in given[2:]))
    assert torch.equal(attend(shape, turned), whole[order])
    assert torch.equal(attend(shape, given, work_of(shape, given)._replace(num_splits=8)), whole)


def pieces_with_other_bits(window: int | None, cuts: list[int], dtype: torch.dtype) -> list[int]:
    """Lengths of the pieces of a prompt, cut there, whose attention is not bit for bit the whole prompt's."""
    shape = Shape(6, 2, 16, 16, window)
    given = batch(shape, [(cuts[-1], cuts[-1])], dtype)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 0.1])
    whole, found = attend(shape, given, sinks=sinks), []
    for first, last in pairwise(cuts):
        part = Batch(given.q[first:last], given.cache, np.array([last - first]), np.array([last]), given.tables)
        if not torch.equal(attend(shape, part, sinks=sinks), whole[first:last]):
            found.append(last - first)
    return found


@pytest.mark.parametrize(
    ("window", "dtype"),
    [
        (None, torch.bfloat16),
        (130, torch.float32),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((None, torch.float32), (130, torch.bfloat16))),
    ],
)
def test_tokens_that_share_a_program_have_the_bits_that_they_have_alone(window: int | None, dtype: torch.dtype) -> None:
    """Programs of up to five tokens, on both sides of a split's end, of a window's beginning and of a block's."""
    shape, requests = Shape(6, 2, 16, 16, window), [(7, SPLIT + 4), (1, 40), (3, SPLIT + 3), (5, 20)]
    given, sinks = batch(shape, requests, dtype), torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 0.1])
    counts = given.num_tokens
    lengths = np.concatenate([np.arange(length - count, length) + 1 for count, length in requests])
    columns = np.ones(len(lengths), np.int64), lengths, given.tables.repeat(counts, 0)
    alone = triton_work(*columns, 3, DEVICE, window)
    shared = shared_tokens(counts, 3)
    assert shared.tolist() == [5, 0, 0, 0, 0, 2, 0, 1, 3, 0, 0, 5, 0, 0, 0, 0]
    together = alone._replace(shared=torch.from_numpy(shared).to(DEVICE))
    got = attend(shape, given, together, sinks=sinks)
    assert torch.equal(got, attend(shape, given, alone, sinks=sinks))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), expected(shape, given, sinks), rtol=tolerance, atol=tolerance)


#: A token alone in its piece is the decode kernel's.
CUTS = [0, 7, 8, 70, SPLIT - 1, SPLIT, SPLIT + 1, SPLIT + 44, SPLIT + 45]


@pytest.mark.parametrize(("window", "dtype"), [(None, torch.bfloat16), (130, torch.float32), (20, torch.bfloat16)])
def test_bits_do_not_depend_on_where_a_prompt_is_cut(window: int | None, dtype: torch.dtype) -> None:
    assert pieces_with_other_bits(window, CUTS, dtype) == []


def test_without_the_splits_of_decode_a_token_alone_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "SPLIT", 1 << 20)
    found = pieces_with_other_bits(None, CUTS, torch.float32)
    assert set(found) == {1}, "how many tokens differ depends on NumPy's products, which depend on the CPU"


def test_the_invariance_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits differ for splits of another size: the test sees the order of summation."""
    shape = Shape(6, 2, 16, 16)
    given = batch(shape, [(1, SPLIT + 40)], torch.float32)
    whole = attend(shape, given)
    monkeypatch.setattr(decode, "SPLIT", SPLIT // 2)
    work = work_of(shape, given)._replace(num_splits=3)
    assert not torch.equal(attend(shape, given, work), whole)


def test_work_columns() -> None:
    columns = work_columns(np.array([1, 70, 1]), np.array([300, 70, 9]), group_size=3)
    assert tile_tokens(3) == 32
    assert columns.decode_tokens.tolist() == [0, 71]
    assert columns.tile_tokens.tolist() == [1, 33, 65]
    assert columns.tile_counts.tolist() == [32, 32, 6]
    assert columns.num_splits == 2
    none = work_columns(np.array([2]), np.array([2]), group_size=1)
    assert (none.decode_tokens.tolist(), none.num_splits) == ([], 0)


@pytest.mark.parametrize(("dtype", "head_dim", "has_sinks"), [(torch.bfloat16, 16, True), (torch.float32, 32, False)])
def test_splits_in_common_are_read_once_and_give_the_same_bits(
    dtype: torch.dtype, head_dim: int, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that fill a program and a part of the next, with a padded one, next to a prompt."""
    monkeypatch.setattr(prefix, "MOST_ROWS", 16)
    shape, requests = Shape(3, 1, head_dim, 16), [*((1, SPLIT + 1 + 9 * row) for row in range(6)), (3, SPLIT + 3)]
    given, sinks = batch(shape, requests, dtype), torch.tensor([0.5, -1.0, 2.0]) if has_sinks else None
    given.tables[:6, : SPLIT // 16] = given.tables[0, : SPLIT // 16]
    work = work_of(shape, given)
    work = work._replace(
        rows=torch.cat((work.rows, work.rows.new_tensor([-1]))),
        positions=torch.cat((work.positions, work.positions.new_tensor([-1]))),
        decode_tokens=torch.cat((work.decode_tokens, work.decode_tokens.new_tensor([9]))),
        num_splits=4,
    )
    given = given._replace(q=torch.cat((given.q, given.q[:1])))
    apart = attend(shape, given, work, sinks=sinks)
    assert apart[:9].isfinite().all()
    for count in (1, 0):  # a graph that has the kernel serves steps with nothing in common too
        common = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        assert torch.equal(attend(shape, given, work._replace(common=common), sinks=sinks), apart)
    # Only the first row of a program reads its table there.
    given.tables[[1, 2, 3, 4], : SPLIT // 16] = given.tables[6, : SPLIT // 16]
    common = torch.ones(1, dtype=torch.int32, device=DEVICE)
    read_once = work_of(shape, given)._replace(
        **{name: getattr(work, name) for name in work._fields if name != "tables"}
    )
    assert torch.equal(attend(shape, given, read_once._replace(common=common), sinks=sinks), apart)
    assert not torch.equal(attend(shape, given, read_once, sinks=sinks), apart)
