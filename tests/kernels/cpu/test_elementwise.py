"""The C kernels that go row by row - norm, rope and cache write, embedding: right, and each row the
same bits wherever it stands, whatever the number of threads; in every variant of the library that this CPU runs."""

import numpy as np
import pytest
import torch

from kernels.cpu.build import usable_variants
from kernels.cpu.library import load_cpu_library
from kernels.cpu.rope import RotaryTable
from kernels.rotary import rotary_frequencies
from kernels.torch import rope
from kernels.torch.rms_norm import rms_norm
from kernels.torch.rope import rotate
from kernels.torch.tensors import to_tensor
from tests.kernels.on_tensors import CpuEmbedding, CpuKVCache, CpuNorm, CpuRope, PackedMatrix

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=usable_variants())
def library(request):
    return load_cpu_library(request.param)


def tolerance(dtype):
    return 2**-8 if dtype == torch.bfloat16 else 2e-6


def rotary_tables(positions, head_dim, theta, factor=1.0):
    return rope.rotary_tables(positions, to_tensor(rotary_frequencies(head_dim, theta)), factor)


def table_of(head_dim, theta):
    table = RotaryTable(rotary_frequencies(head_dim, theta))
    table.reach(600)
    return table


def test_a_rotary_table_that_reaches_further_keeps_its_bits():
    table = RotaryTable(rotary_frequencies(20, 100.0), 1.25)
    for reach in (1, 1000, 3000, 2000):
        table.reach(reach)
        before = table.cos.copy(), table.sin.copy()
        table.reach(reach + 1500)
        assert len(table.cos) >= reach + 1500
        assert np.array_equal(table.cos[: len(before[0])], before[0])
        assert np.array_equal(table.sin[: len(before[1])], before[1])
    expected = rotary_tables(torch.arange(len(table.cos)), 20, 100.0, 1.25)
    for mine, theirs in zip((table.cos, table.sin), expected, strict=True):
        assert np.array_equal(mine, theirs[:, 0].numpy())


def check_rows(function, rows, library):
    """function maps rows [T, ...] to [T, ...], in any cut and with any number of threads."""
    whole = function(rows)
    for num_threads in (1, 2, 3):
        library.start_threads(num_threads)
        for count in (0, 1, 2, 3, 13, 40)[:: num_threads if num_threads < 3 else 5]:
            for first in (0, 1, len(rows) - count):
                assert torch.equal(function(rows[first : first + count].clone()), whole[first : first + count])
        assert torch.equal(function(rows), whole)
    library.stop_threads()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 33, 96, 576])
def test_norm(width, x_dtype, dtype, library):
    generator = torch.Generator().manual_seed(width)
    x = (torch.randn(50, width, generator=generator) * torch.rand(50, 1, generator=generator) * 9).to(x_dtype)
    norm = CpuNorm(library, torch.randn(width, generator=generator), 1e-5, dtype)
    exact = x.double() * torch.rsqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-5) * to_tensor(norm.weight)
    got = norm(x)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), exact, rtol=tolerance(dtype), atol=1e-7)
    check_rows(norm, x, library)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [7, 33, 576])
def test_addition_before_a_norm(width, dtype, library):
    generator = torch.Generator().manual_seed(width)
    hidden = torch.randn(50, width, generator=generator)
    x = torch.randn(50, width, generator=generator).to(dtype)
    norm = CpuNorm(library, torch.randn(width, generator=generator), 1e-6, dtype)
    expected = hidden + x
    got = norm.after(hidden, x)
    assert torch.equal(hidden, expected)
    assert torch.equal(got, norm(expected))
    assert torch.allclose(
        got.float(), rms_norm(expected, to_tensor(norm.weight), 1e-6, torch.float32), rtol=tolerance(dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [7, 64])
def test_embedding(width, dtype, library):
    table = torch.randn(90, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    embedding = CpuEmbedding(library, table, 1.25)
    ids = torch.randint(0, 90, (50,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(embedding(ids), table[ids].float() * 1.25)
    check_rows(embedding, ids, library)
    packed = CpuEmbedding(library, PackedMatrix(library, table), 1.25)
    assert torch.equal(packed(ids), embedding(ids))
    check_rows(packed, ids, library)


EPS = 1e-3  # far from 0, since two numbers of nearly the same size have hardly a variance


def centred(x, weight, eps, dtype):
    """Layer normalisation, as rms_norm() is called."""
    less = x.double() - x.double().mean(-1, keepdim=True)
    return (less / (less.square().mean(-1, keepdim=True) + eps).sqrt() * weight).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 20, 64, 80, 256])
@pytest.mark.parametrize("normalises", [None, rms_norm, centred], ids=["no norms", "norms", "centred norms"])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_rope(is_after, normalises, head_dim, dtype, library):
    """The result has the bits of kernels.torch.rope without head norms, and is close to it with them."""
    num_heads, num_kv_heads = 5, 2
    qkv = torch.randn(40, (num_heads + 2 * num_kv_heads) * head_dim, generator=torch.Generator().manual_seed(0))
    qkv = qkv.to(dtype)
    norms = torch.rand(num_heads + num_kv_heads, head_dim, generator=torch.Generator().manual_seed(1)) + 0.5
    rope = CpuRope(
        library, num_heads, norms if normalises else None, EPS, is_centred=normalises is centred, is_after=is_after
    )
    cache = CpuKVCache(2, 5, 16, num_kv_heads, head_dim=head_dim, dtype=dtype)
    slots = torch.arange(16, 56)
    positions, table = torch.arange(40) * 13, table_of(head_dim, 10_000.0)
    cos, sin = rotary_tables(positions, head_dim, 10_000.0)
    heads = qkv.view(40, -1, head_dim)[:, : num_heads + num_kv_heads].float()
    if normalises and not is_after:
        heads = normalises(heads, norms, EPS, torch.float32)
    expected = rotate(heads, cos, sin)
    if normalises and is_after:
        expected = normalises(expected, norms, EPS, torch.float32)
    expected = expected.to(dtype)
    q = rope(qkv, table, positions, cache, 1, slots)
    keys = cache.keys(1).flatten(0, 1)[slots]
    got = torch.cat((q, keys), 1)
    assert got.dtype == dtype
    if not normalises:
        assert torch.equal(got, expected)
    error = (got.float() - expected.float()).abs()
    assert (error <= tolerance(dtype) * 2 * expected.float().abs() + 1e-5 * bool(normalises)).all()

    def at_positions(rows):
        width = qkv.shape[1]
        own = rows[:, width].long().contiguous()
        return rope(rows[:, :width].to(dtype).contiguous(), table, own, cache, 0, slots[: len(rows)])

    check_rows(at_positions, torch.cat((qkv.float(), positions[:, None]), 1), library)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_cache_write_stores_what_it_should_where_it_should(block_size, dtype, library):
    num_slots = 3 * 64
    caches = [CpuKVCache(2, num_slots // block_size, block_size, 2, head_dim=12, dtype=dtype) for _ in range(2)]
    for cache in caches:
        for layer in cache.tensors:
            layer.fill_(-7.0)
    qkv = torch.randn(6, (4 + 2 * 2) * 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = torch.tensor([0, 1, 9, 3, 4, 7])
    cos, sin = rotary_tables(positions, 12, 100.0)
    slots = torch.tensor([64, 191, -1, 101, 100, 79])
    stored = torch.tensor([0, 1, 3, 4, 5])
    CpuRope(library, 4)(qkv, table_of(12, 100.0), positions, caches[0], 1, slots)
    rotated = rotate(qkv.view(6, 8, 12)[:, 4:6], cos, sin).to(dtype)
    kv = torch.cat((rotated.flatten(1), qkv[:, 6 * 12 :]), 1)
    caches[1].write(1, slots[stored], kv[stored])
    for mine, expected in zip(caches[0].tensors, caches[1].tensors, strict=True):
        assert torch.equal(mine, expected)
    assert torch.equal(caches[0].keys(1).flatten(0, 1)[slots[stored]].flatten(1), kv[stored, :24])
    assert torch.equal(caches[0].values(1).flatten(0, 1)[slots[stored]].flatten(1), kv[stored, 24:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 12, 24, 64, 80, 288])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_a_chunk_written_at_once_is_that_of_its_tokens(block_size, head_dim, dtype, library):
    """Chunks 1 and 2 of slots, parts of those beside them, then one whose tokens do not follow each other."""
    caches = [CpuKVCache(1, 128 // block_size, block_size, 2, head_dim=head_dim, dtype=dtype) for _ in range(3)]
    for cache in caches:
        cache.tensors[0].fill_(-7.0)
    slots = torch.tensor([*range(11, 52), *range(64, 72), *range(73, 80), 72])
    qkv = torch.randn(len(slots), 8 * head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    qkv[20, 5 * head_dim + 1] = torch.inf
    qkv[30, 7 * head_dim - 1] = torch.nan
    rope, table, positions = CpuRope(library, 4), table_of(head_dim, 100.0), torch.arange(len(slots))
    rope(qkv, table, positions, caches[0], 0, slots)
    for i in range(len(slots)):
        rope(qkv[i : i + 1].clone(), table, positions[i : i + 1], caches[1], 0, slots[i : i + 1])
    assert caches[0].layers[0].tobytes() == caches[1].layers[0].tobytes()
    heads = qkv.view(len(slots), 8, head_dim)[:, 4:6]
    keys = rotate(heads, *rotary_tables(positions, head_dim, 100.0)).to(dtype)
    caches[2].write(0, slots, torch.cat((keys.flatten(1), qkv[:, 6 * head_dim :]), 1))
    is_good = torch.tensor([i not in (20, 30) for i in range(len(slots))])
    for mine, expected in zip(
        (caches[0].keys(0), caches[0].values(0)), (caches[2].keys(0), caches[2].values(0)), strict=True
    ):
        assert torch.equal(mine.flatten(0, 1)[slots[is_good]], expected.flatten(0, 1)[slots[is_good]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("head", [5, 7])  # the second of K, and of V
def test_a_key_or_value_that_is_not_finite_shows_as_nan_in_the_key(head, bad, dtype, library):
    """An infinite key may make a score minus infinity, which is also the score of a hidden token."""
    cache = CpuKVCache(1, 3, 16, 2, head_dim=16, dtype=dtype)
    qkv = torch.ones(2, 8 * 16, dtype=dtype)
    qkv[1, head * 16 + 3] = bad
    CpuRope(library, 4)(qkv, table_of(16, 100.0), torch.tensor([0, 1]), cache, 0, torch.tensor([16, 17]))
    keys = cache.keys(0).flatten(0, 1)[16:18]
    assert keys[1, 1].isnan().any()
    assert keys[0].isfinite().all()
    assert keys[1, 0].isfinite().all()


def test_a_head_is_normalised_by_its_own_weight(library):
    norms = torch.arange(1.0, 4.0)[:, None].expand(3, 8)
    cache = CpuKVCache(1, 2, 16, 1, head_dim=8, dtype=torch.float32)
    q = CpuRope(library, 2, norms, 0.0)(
        torch.ones(1, 4 * 8), table_of(8, 100.0), torch.tensor([0]), cache, 0, torch.tensor([16])
    )
    assert torch.equal(q, norms[None, :2])
    assert torch.equal(cache.keys(0)[1, 0, 0], norms[2])
    assert torch.equal(cache.values(0)[1, 0, 0], torch.ones(8))
