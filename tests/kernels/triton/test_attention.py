"""Triton's attention equals the float64 oracle: shuffled tables, poisoned caches, padding, any chunking and batch."""

from copy import copy
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from kernels.rounding import ceil_div
from kernels.torch.attention import attention_metadata
from kernels.torch.kv_cache import TorchKVCache
from kernels.torch.tensors import element_type
from kernels.triton import decode_attention as decode
from kernels.triton.attention_work import (
    SPLIT,
    TritonWork,
    shared_tokens,
    tile_tokens,
    triton_work,
    work_columns,
)
from kernels.triton.decode_attention import decode_attention
from kernels.triton.prefill_attention import prefill_attention
from tests.kernels.attention_reference import reference_attention
from tests.triton_device import ANYWHERE, DEVICE, ON_GPU

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


@pytest.mark.parametrize("window", [None, 20])
def test_a_prompt_may_be_cut_anywhere(window: int | None) -> None:
    """Results are equal up to rounding: NumPy's products do not give a row equal bits at every place of a tile."""
    shape = Shape(6, 2, 16, 16, window)
    given = batch(shape, [(90, 90)], torch.float32)
    whole = attend(shape, given)
    for first, last in ((0, 7), (7, 8), (8, 70), (70, 90)):
        part = Batch(given.q[first:last], given.cache, np.array([last - first]), np.array([last]), given.tables)
        torch.testing.assert_close(attend(shape, part), whole[first:last], rtol=1e-5, atol=1e-6)


def add_in_order(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    """A product for the interpreter: each number of it one sum in ascending order, wherever in the tile it stands."""
    products = a.data[:, :, None] * b.data[None]
    return interpreter.TensorHandle(products.sum(1, dtype=a.data.dtype) + total.data, total.dtype.scalar)


def add_by_place(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    """Every other row of a tile is summed from the end."""
    result = add_in_order(builder, a, b, total)
    products = a.data[1::2, ::-1, None] * b.data[None, ::-1]
    result.data[1::2] = products.sum(1, dtype=a.data.dtype) + total.data[1::2]
    return result


def pieces_with_other_bits(window: int | None, cuts: list[int]) -> list[int]:
    """Lengths of the pieces of a prompt, cut there, whose attention is not bit for bit the whole prompt's."""
    shape = Shape(6, 2, 16, 16, window)
    given = batch(shape, [(cuts[-1], cuts[-1])], torch.float32)
    whole, found = attend(shape, given), []
    for first, last in pairwise(cuts):
        part = Batch(given.q[first:last], given.cache, np.array([last - first]), np.array([last]), given.tables)
        if not torch.equal(attend(shape, part), whole[first:last]):
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
def test_tokens_that_share_a_program_have_the_bits_that_they_have_alone(
    window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of up to five tokens, on both sides of a split's end, of a window's beginning and of a block's."""
    if not ON_GPU:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", add_in_order)
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


@pytest.mark.parametrize("window", [None, 20])
def test_bits_do_not_depend_on_where_a_prompt_is_cut(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own order does not: tiles of keys begin at absolute positions. A piece of one token is the decode
    kernel's, whose order is the same up to SPLIT tokens of context, but on a GPU not the instruction."""
    if not ON_GPU:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", add_in_order)
        assert pieces_with_other_bits(window, [0, 7, 8, 70, 71, 90]) == []
    assert pieces_with_other_bits(window, [0, 3, 20, 55, 57, 90]) == []


@pytest.mark.skipif(ON_GPU, reason="with products of its own")
def test_the_test_of_cut_prompts_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", add_by_place)
    assert pieces_with_other_bits(None, [0, 3, 20, 55, 57, 90]) != []


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
    assert tile_tokens(3) == 16
    assert columns.decode_tokens.tolist() == [0, 71]
    assert columns.tile_tokens.tolist() == [1, 17, 33, 49, 65]
    assert columns.tile_counts.tolist() == [16, 16, 16, 16, 6]
    assert columns.num_splits == 2
    none = work_columns(np.array([2]), np.array([2]), group_size=1)
    assert (none.decode_tokens.tolist(), none.num_splits) == ([], 0)
