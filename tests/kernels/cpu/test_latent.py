"""Latent attention of the C kernels against its definition with the K and V of every head, in float64."""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from ipc.tables.arrays import Floats, Ints
from kernels.cpu.attention import CpuAttention
from kernels.cpu.attention_plan import AttentionPlanner
from kernels.cpu.build import usable_variants
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.latent import CpuLatent
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.cpu.quantized_kv_cache import QuantizedKVCache
from kernels.cpu.rope import RotaryTable
from kernels.elements import BFLOAT16, FLOAT32, Dtype, Numbers, rounded, to_floats

HEADS, LATENT, PLAIN, ROTATED, VALUE, QUERY = 3, 64, 20, 8, 24, 40
LENGTH = 600  # tokens: more than a tile of attention
SCALE = 0.3
CHUNKS = [1, 130, 7, 400, *[1] * 62]
FREQUENCIES = np.array([1.0, 0.3, 0.1, 0.03], np.float32)


Doubles: TypeAlias = npt.NDArray[np.float64]


class Layer(NamedTuple):
    """Weights as numbers of dtype."""

    keys: Numbers  # [H, LATENT, PLAIN]
    values: Numbers  # [H, VALUE, LATENT]
    query: Numbers | None
    norms: Floats  # [QUERY + LATENT]

    def packed(self, library: CpuLibrary, dtype: Dtype) -> CpuLatent:
        def product(weight: Numbers) -> PackedMatrix:
            return PackedMatrix(library, np.ascontiguousarray(weight), dtype=dtype)

        keys, values = (list(map(product, each)) for each in (self.keys, self.values))
        query, norm = (None, None) if self.query is None else (product(self.query), self.norms[:QUERY])
        latent_norm = self.norms[QUERY:]
        return CpuLatent(
            library, keys, values, latent_norm, rotated_dim=ROTATED, eps=1e-6, query=query, query_norm=norm
        )


def layer_of(dtype: Dtype, has_query: bool) -> Layer:
    rng = np.random.default_rng(5)

    def numbers(*shape: int) -> Numbers:
        return rounded(rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5), dtype)

    query = numbers(HEADS * (PLAIN + ROTATED), QUERY) if has_query else None
    norms = 1 + rng.standard_normal(QUERY + LATENT, np.float32) * np.float32(0.2)
    return Layer(numbers(HEADS, LATENT, PLAIN), numbers(HEADS, VALUE, LATENT), query, norms)


def rows_of(dtype: Dtype, has_query: bool) -> Numbers:
    width = (QUERY if has_query else HEADS * (PLAIN + ROTATED)) + LATENT + ROTATED
    return rounded(np.random.default_rng(6).standard_normal((LENGTH, width), np.float32), dtype)


def normalised(x: Doubles, weight: Floats) -> Doubles:
    result: Doubles = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight
    return result


def turned(x: Doubles, positions: Ints) -> Doubles:
    """x [T, ..., ROTATED]: number i is turned with number i + ROTATED / 2."""
    angles = positions.reshape(-1, *[1] * (x.ndim - 1)) * FREQUENCIES.astype(np.float64)
    first, second = np.split(x, 2, -1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def defined(layer: Layer, rows: Numbers) -> Doubles:
    """[T, H * VALUE]: every head has its K and V of every token."""
    x, positions = to_floats(rows).astype(np.float64), np.arange(len(rows))
    queries, latent, rotated = np.split(x, [x.shape[1] - LATENT - ROTATED, x.shape[1] - ROTATED], -1)
    if layer.query is not None:
        queries = normalised(queries, layer.norms[:QUERY]) @ to_floats(layer.query).astype(np.float64).T
    latent = normalised(latent, layer.norms[QUERY:])
    queries = queries.reshape(len(x), HEADS, -1)
    plain, own = queries[..., :PLAIN], turned(queries[..., PLAIN:], positions)
    key = turned(rotated, positions)
    outputs = []
    for head in range(HEADS):
        keys = latent @ to_floats(layer.keys[head]).astype(np.float64)
        scores = (plain[:, head] @ keys.T + own[:, head] @ key.T) * SCALE
        scores[np.triu_indices(len(x), 1)] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        outputs.append(weights @ (latent @ to_floats(layer.values[head]).astype(np.float64).T))
    return np.concatenate(outputs, 1)


def computed(
    library: CpuLibrary,
    layer: Layer,
    rows: Numbers,
    chunks: list[int],
    block_size: int = 16,
    cache_type: type[CpuKVCache] = CpuKVCache,
) -> Numbers:
    """The same by the kernels, chunk after chunk."""
    dtype, num_blocks = rows.dtype, 1 + -(-LENGTH // block_size)
    latent, attention = layer.packed(library, dtype), CpuAttention(library)
    cache = cache_type(1, num_blocks, block_size, 1, head_dim=LATENT + ROTATED, dtype=dtype, value_dim=LATENT)
    blocks = np.arange(1, num_blocks, dtype=np.int32)[::-1].copy()
    planner, table, outputs, first = AttentionPlanner(library, HEADS, 1), RotaryTable(FREQUENCIES), [], 0
    table.reach(LENGTH)
    for count in chunks:
        positions = np.arange(first, first + count)
        slots = blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size
        q = latent.begin(rows[first : first + count].copy(), table, positions, cache, 0, slots)
        plan = planner(np.array([count]), np.array([first + count]), blocks[None], block_size)
        outputs.append(latent.expand(attention(q, cache, 0, plan, SCALE)))
        first += count
    assert first == len(rows)
    return np.concatenate(outputs)


@pytest.fixture
def library() -> Iterator[CpuLibrary]:
    library = load_cpu_library()
    yield library
    library.stop_threads()


@pytest.mark.parametrize("has_query", [False, True], ids=["plain queries", "latent queries"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_the_result_is_that_of_every_heads_own_k_and_v(dtype: Dtype, has_query: bool) -> None:
    layer, rows = layer_of(dtype, has_query), rows_of(dtype, has_query)
    expected, tolerance = defined(layer, rows), 3e-6 if dtype == FLOAT32 else 4e-2
    for variant in usable_variants():
        got = to_floats(computed(load_cpu_library(variant), layer, rows, [LENGTH]))
        assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max(), variant


@pytest.mark.parametrize("cache_type", [CpuKVCache, QuantizedKVCache], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_chunks_threads_and_blocks_change_no_bit(dtype: Dtype, cache_type: type[CpuKVCache]) -> None:
    layer, rows = layer_of(dtype, True), rows_of(dtype, True)
    for variant in usable_variants():
        library = load_cpu_library(variant)
        whole = computed(library, layer, rows, [LENGTH], cache_type=cache_type)
        for num_threads, chunks, block_size in ((2, [LENGTH], 64), (1, CHUNKS, 4), (2, CHUNKS, 16)):
            library.start_threads(num_threads)
            got = computed(library, layer, rows, chunks, block_size, cache_type)
            library.stop_threads()
            assert got.tobytes() == whole.tobytes(), (variant, num_threads, block_size)


def test_the_cache_has_one_side_whose_values_are_its_first_numbers(library: CpuLibrary) -> None:
    cache = CpuKVCache(1, 3, 16, 1, head_dim=LATENT + ROTATED, dtype=FLOAT32, value_dim=LATENT)
    assert cache.memory[0].nbytes == 3 * 16 * 80 * 4  # 72 numbers, rounded up to 80
    assert CpuKVCache.bytes_per_block(16, 1, LATENT + ROTATED, 1, FLOAT32, num_sides=1) == 16 * 80 * 4
    rows = np.random.default_rng(1).standard_normal((5, 2 * (LATENT + ROTATED)), np.float32)
    cache.write(0, np.arange(20, 25), rows)
    assert np.array_equal(cache.keys(0)[1, 4:9, 0], rows[:, : LATENT + ROTATED])
    assert np.array_equal(cache.values(0)[1, 4:9, 0], rows[:, :LATENT])


@pytest.mark.parametrize("part", ["latent", "rotated"])
def test_a_number_that_is_not_finite_reaches_those_that_see_it(part: str, library: CpuLibrary) -> None:
    layer, rows = layer_of(FLOAT32, False), rows_of(FLOAT32, False)[:40]
    expected = computed(library, layer, rows, [40])
    rows[17, -1 if part == "rotated" else -ROTATED - 1] = np.inf
    got = computed(library, layer, rows, [40])
    assert got[:17].tobytes() == expected[:17].tobytes()
    assert np.isnan(got[17:]).all()
