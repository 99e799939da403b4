"""A KV cache in 8 bits: stored as its Python definition says, read as the numbers that this gives, in every variant."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels.cpu.attention import CpuAttention
from kernels.cpu.attention_plan import AttentionPlanner
from kernels.cpu.build import usable_variants
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.cpu.quantized_kv_cache import QuantizedKVCache, quantized
from kernels.cpu.rope import CpuRope
from kernels.elements import BFLOAT16, FLOAT32, Dtype, Numbers, rounded, to_floats
from tests.numbers import nan

DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16}
HEADS, KV_HEADS = 6, 2
LARGEST = np.float32(np.finfo(np.float32).max)


@pytest.fixture(params=usable_variants())
def library(request: pytest.FixtureRequest) -> CpuLibrary:
    return load_cpu_library(request.param)


def hostile_rows(count: int, width: int, dtype: Dtype) -> Numbers:
    """Rows of every size, of zeros, of numbers that round to halves of codes, and with what is not finite."""
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((count, width)).astype(np.float32) * np.exp2(
        rng.integers(-90, 90, (count, 1)), dtype="f4"
    )
    rows[3], rows[4], rows[5] = 0, -0.0, 1e-33
    rows[6, -1], rows[7, 0], rows[8, width // 2] = np.nan, np.inf, -np.inf
    rows[9], rows[10] = LARGEST, np.linspace(-1, 1, width, dtype=np.float32) * LARGEST
    rows[11] = np.arange(width) - width / 2 + 0.5
    rows[11, 0] = 127
    with np.errstate(over="ignore"):
        return rounded(rows, dtype)


def empty(head_dim: int, block_size: int, dtype: Dtype, kind: type[CpuKVCache] = QuantizedKVCache) -> CpuKVCache:
    cache = kind(1, 700 // block_size + 4, block_size, KV_HEADS, head_dim=head_dim, dtype=dtype)
    cache.layers[0][:] = 0
    return cache


def write(library: CpuLibrary, qkv: Numbers, cache: CpuKVCache, slots: Any) -> None:
    """By the C kernel, without rotation."""
    ones, zeros = np.ones((1, cache.head_dim), np.float32), np.zeros((1, cache.head_dim), np.float32)
    table: Any = SimpleNamespace(cos=ones, query_cos=ones, sin=zeros, query_sin=zeros)
    CpuRope(library, HEADS, None, 1e-5)(qkv, table, np.zeros(len(qkv), np.int64), cache, 0, slots)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 12, 64, 80])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_the_kernels_store_what_the_definition_says(
    block_size: int, head_dim: int, dtype: str, library: CpuLibrary
) -> None:
    qkv = hostile_rows(50, (HEADS + 2 * KV_HEADS) * head_dim, DTYPES[dtype])
    slots = np.random.default_rng(2).permutation(50) + block_size
    mine, expected = (empty(head_dim, block_size, DTYPES[dtype]) for _ in range(2))
    with np.errstate(invalid="ignore"):
        kv = qkv.reshape(50, -1, head_dim)[:, HEADS:].reshape(50, 2, KV_HEADS, head_dim).copy()
        is_bad = ~np.isfinite(to_floats(kv)).all((1, 3))
    kv[:, 0, :, 0][is_bad] = nan(DTYPES[dtype])
    expected.write(0, slots, kv.reshape(50, -1))
    write(library, qkv, mine, slots)
    assert mine.layers[0].tobytes() == expected.layers[0].tobytes()
    assert is_bad.any()
    keys = to_floats(mine.keys(0)).reshape(-1, KV_HEADS, head_dim)[slots]
    assert np.array_equal(np.isnan(keys), np.broadcast_to(is_bad[..., None], keys.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(16, 16), (20, 16), (64, 32), (80, 16), (64, 1), (24, 8), (128, 64)]
)
def test_attention_over_codes_is_attention_over_what_they_stand_for(
    head_dim: int, block_size: int, dtype: str, library: CpuLibrary
) -> None:
    """Bit for bit: one request of 600 tokens, all its rows at once and one, and another that shares no block."""
    lengths, rng = np.array([600, 31]), np.random.default_rng(3)
    codes, numbers = empty(head_dim, block_size, DTYPES[dtype]), empty(head_dim, block_size, DTYPES[dtype], CpuKVCache)
    blocks = rng.permutation(np.arange(1, codes.num_blocks)).astype(np.int32)
    width = -(-600 // block_size)
    tables = np.stack([blocks[:width], np.resize(blocks[width:], width)])
    kv = rounded(rng.standard_normal((700, 2 * KV_HEADS * head_dim), np.float32), DTYPES[dtype])
    codes.write(0, np.arange(block_size, 700), kv[block_size:])
    read = np.concatenate([each(0).reshape(-1, KV_HEADS * head_dim) for each in (codes.keys, codes.values)], 1)
    numbers.write(0, np.arange(block_size, 700), read[block_size:700])
    planner, attention = AttentionPlanner(library, HEADS, KV_HEADS), CpuAttention(library)
    for rows in (np.array([600, 31]), np.array([1, 2]), np.array([17, 1])):
        q = rounded(rng.standard_normal((int(rows.sum()), HEADS, head_dim), np.float32), DTYPES[dtype])
        plan = planner(rows, lengths, tables, block_size, None)
        outputs = [attention(q, cache, 0, plan, 0.125) for cache in (codes, numbers)]
        assert outputs[0].tobytes() == outputs[1].tobytes()
        assert np.isfinite(to_floats(outputs[0])).all()
        assert to_floats(outputs[0]).any()


def test_a_number_is_read_within_half_a_127th_of_the_largest_and_never_larger() -> None:
    rows = to_floats(hostile_rows(60, 64, FLOAT32))
    codes, scales = quantized(rows)
    read = codes * scales[:, None]
    is_finite = np.isfinite(rows).all(1)
    largest = np.abs(rows).max(1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        assert (np.abs(read - rows) <= largest * 0.5001 / 127 + 1e-30)[is_finite].all()
    assert (np.abs(read) <= largest)[is_finite].all()
    assert np.isnan(read[~is_finite]).all()
    assert (np.abs(codes.astype(int)).max(1) == 127)[is_finite & (largest[:, 0] > 1e-30)].all()


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_a_block_takes_about_half_of_bfloat16s_bytes(head_dim: int) -> None:
    sizes = (16, 3, head_dim, 30, BFLOAT16)
    share = QuantizedKVCache.bytes_per_block(*sizes) / CpuKVCache.bytes_per_block(*sizes)
    assert share == (head_dim + 4) / (2 * head_dim)
    cache = QuantizedKVCache(30, 7, 16, 3, head_dim=head_dim, dtype=BFLOAT16)
    assert sum(layer.nbytes for layer in cache.memory) == 7 * QuantizedKVCache.bytes_per_block(*sizes)


def test_blocks_are_copied_with_their_scales() -> None:
    cache, other = (empty(24, 16, BFLOAT16) for _ in range(2))
    rows = rounded(np.random.default_rng(1).standard_normal((32, 2 * KV_HEADS * 24), np.float32), BFLOAT16)
    cache.write(0, np.arange(16, 48), rows)
    cache.copy_blocks(np.array([1, 2], np.int32), other, np.array([5, 3], np.int32))
    for one, copied in ((cache.keys(0), other.keys(0)), (cache.values(0), other.values(0))):
        assert np.array_equal(one[[1, 2]], copied[[5, 3]])
        assert one[[1, 2]].any()
