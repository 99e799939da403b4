"""What V of a layer may be, experts beside a dense MLP, and inputs of single layers, against their definitions."""

from typing import Any

import numpy as np
import pytest

from kernels.cpu.embedding import CpuEmbedding
from kernels.cpu.experts import CpuExperts
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import CpuLibrary
from kernels.cpu.per_layer import CpuPerLayerInputs
from kernels.cpu.quantized import BlockRows
from kernels.cpu.rope import CpuRope, RotaryTable
from kernels.dequantize import dequantize
from kernels.elements import BFLOAT16, FLOAT32, Dtype, rounded, to_floats
from kernels.rotary import rotary_frequencies
from kernels.routing import Routing
from kernels.value_form import SIDES, ValueForm
from tests.kernels.cpu.test_experts import CHOSEN, WIDTH, Weights, rows_of
from tests.kernels.test_dequantize import random_blocks

HEADS, KV_HEADS, EPS = 4, 2, 1e-3


def normalised(x: Any, weight: Any = 1.0, eps: float = EPS) -> Any:
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("head_dim", [20, 64, 288])
@pytest.mark.parametrize("values", ["normalised", "keys"])
def test_values_are_normalised(values: ValueForm, head_dim: int, dtype: Dtype, c_library: CpuLibrary) -> None:
    """Chunks of 16 tokens are written at once, others token by token: both have the same bits."""
    library = c_library
    rng, count = np.random.default_rng(3), 37
    columns = (HEADS + SIDES[values] * KV_HEADS) * head_dim
    qkv = rounded(rng.standard_normal((count, columns), np.float32), dtype)
    norms = np.concatenate([rng.random((HEADS + KV_HEADS, head_dim), np.float32) + 0.5, np.ones((KV_HEADS, head_dim))])
    rope = CpuRope(library, HEADS, norms.astype(np.float32), EPS, values=values)
    table = RotaryTable(rotary_frequencies(head_dim, 1e4))
    table.reach(count)
    positions, slots = np.arange(count), np.arange(11, 11 + count)
    caches = [CpuKVCache(1, 4, 16, KV_HEADS, head_dim=head_dim, dtype=dtype) for _ in range(2)]
    for cache in caches:
        cache.memory[0][:] = 0
    rope(qkv, table, positions, caches[0], 0, slots)
    for one in range(count):
        own = slice(one, one + 1)
        rope(np.ascontiguousarray(qkv[own]), table, positions[own], caches[1], 0, slots[own])
    assert caches[0].layers[0].tobytes() == caches[1].layers[0].tobytes()
    heads = to_floats(qkv).reshape(count, -1, head_dim)
    raw = heads[:, HEADS : HEADS + KV_HEADS] if values == "keys" else heads[:, -KV_HEADS:]
    stored = to_floats(caches[0].values(0)).reshape(-1, KV_HEADS, head_dim)[slots]
    assert np.abs(stored - normalised(raw)).max() < (1e-5 if dtype == FLOAT32 else 0.02)
    plain = CpuRope(library, HEADS, norms[: HEADS + KV_HEADS].astype(np.float32), EPS)
    keys = caches[0].keys(0).copy()
    again = qkv if values == "normalised" else np.concatenate([qkv, qkv[:, HEADS * head_dim :]], 1)
    plain(np.ascontiguousarray(again), table, positions, caches[0], 0, slots)
    assert caches[0].keys(0).tobytes() == keys.tobytes()  # K does not depend on the form of V


def test_a_layer_that_shares_keys_and_values_writes_none(c_library: CpuLibrary) -> None:
    library = c_library
    rng, head_dim = np.random.default_rng(4), 32
    qkv = rng.standard_normal((20, (HEADS + 2 * KV_HEADS) * head_dim), np.float32)
    norms = rng.random((HEADS + KV_HEADS, head_dim), np.float32)
    table = RotaryTable(rotary_frequencies(head_dim, 1e4))
    table.reach(20)
    cache = CpuKVCache(1, 3, 16, KV_HEADS, head_dim=head_dim, dtype=FLOAT32)
    positions, slots = np.arange(20), np.arange(16, 36)
    expected = CpuRope(library, HEADS, norms, EPS)(qkv, table, positions, cache, 0, slots)
    cache.memory[0][:] = 7
    own = np.ascontiguousarray(qkv[:, : HEADS * head_dim])
    got = CpuRope(library, HEADS, norms[:HEADS], EPS, values="shared")(own, table, positions, cache, 0, slots)
    assert got.tobytes() == expected.tobytes()
    assert (cache.layers[0] == 7).all()


def test_a_value_that_is_not_finite_shows_as_nan_in_the_key(c_library: CpuLibrary) -> None:
    library = c_library
    qkv = np.ones((2, (HEADS + 2 * KV_HEADS) * 16), np.float32)
    qkv[1, (HEADS + KV_HEADS + 1) * 16 + 3] = np.inf
    norms = np.ones((HEADS + 2 * KV_HEADS, 16), np.float32)
    table = RotaryTable(rotary_frequencies(16, 1e4))
    table.reach(2)
    cache = CpuKVCache(1, 2, 16, KV_HEADS, head_dim=16, dtype=FLOAT32)
    CpuRope(library, HEADS, norms, EPS, values="normalised")(qkv, table, np.arange(2), cache, 0, np.arange(16, 18))
    keys = cache.keys(0).reshape(-1, KV_HEADS, 16)[16:18]
    assert np.isnan(keys[1, 1]).any()
    assert np.isfinite(keys[0]).all()
    assert np.isfinite(keys[1, 0]).all()


def test_a_router_may_read_other_rows_and_experts_have_scales(c_library: CpuLibrary) -> None:
    """The sum has each expert's weight times its scale; which experts it has the router's rows say."""
    library = c_library
    weights, rng = Weights(FLOAT32), np.random.default_rng(5)
    plain = weights.packed(library)
    count = len(plain.experts)
    x, router_x = rows_of(40, FLOAT32), rng.standard_normal((40, WIDTH), np.float32)
    scales = rng.random(count).astype(np.float32) + np.float32(0.5)
    scaled = CpuExperts(library, plain.router, plain.experts, Routing(CHOSEN, True, scales=scales))
    got = scaled(x, router_x)
    logits = plain.router(router_x)
    for row in range(40):
        chosen = sorted(np.argsort(-logits[row], kind="stable")[:CHOSEN].tolist())
        shares = np.exp(logits[row][chosen].astype(np.float64))
        shares /= shares.sum()
        every = [plain.experts[one].down(plain.experts[one].gate_up(x[row : row + 1]))[0] for one in chosen]
        expected = sum(share * scales[one] * result for share, one, result in zip(shares, chosen, every, strict=True))
        assert np.abs(got[row] - expected).max() < 1e-4
    assert plain(x, x).tobytes() == plain(x).tobytes()
    assert plain(x, router_x).tobytes() != plain(x).tobytes()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_inputs_of_single_layers(num_threads: int, dtype: Dtype, c_library: CpuLibrary) -> None:
    library = c_library
    rng, width, layers, vocab, hidden, count = np.random.default_rng(6), 40, 3, 50, 24, 700
    table = rounded(rng.standard_normal((vocab * layers, width), np.float32), dtype)
    projection = PackedMatrix(
        library, rounded(rng.standard_normal((layers * width, hidden), np.float32), dtype), dtype=dtype
    )
    norm = rng.random(width).astype(np.float32) + np.float32(0.5)
    lookup = CpuEmbedding(library, table, 1.5)
    inputs = CpuPerLayerInputs(library, lookup, projection, norm=norm, eps=EPS, given_id=7)
    ids = rng.integers(0, vocab, count)
    embedded = rng.standard_normal((count, hidden), np.float32)
    projected = inputs.project(embedded)
    library.start_threads(num_threads)
    try:
        for layer in range(layers):
            x = rounded(rng.standard_normal((count, width), np.float32), dtype)
            own = to_floats(projected).reshape(count, layers, width)[:, layer]
            expected = normalised(own, norm) + 1.5 * to_floats(table).reshape(vocab, layers, width)[ids, layer]
            expected *= to_floats(x)
            got = inputs.multiply(x.copy(), ids, projected, layer)
            error = np.abs(to_floats(got) - expected)
            assert (error <= (1e-5 if dtype == FLOAT32 else 0.01) * (1 + np.abs(expected))).all()
            one = inputs.multiply(x[5:6].copy(), ids[5:6], np.ascontiguousarray(projected[5:6]), layer)
            assert one.tobytes() == got[5:6].tobytes()
            given = inputs.multiply(x[5:6].copy(), np.array([-9]), np.ascontiguousarray(projected[5:6]), layer)
            seven = inputs.multiply(x[5:6].copy(), np.array([7]), np.ascontiguousarray(projected[5:6]), layer)
            assert given.tobytes() == seven.tobytes()
            alone = CpuPerLayerInputs(library, None, projection, norm=norm, eps=EPS)
            expected, got = normalised(own, norm) * to_floats(x), alone.multiply(x.copy(), ids, projected, layer)
            error = np.abs(to_floats(got) - expected)
            assert (error <= (1e-5 if dtype == FLOAT32 else 0.01) * (1 + np.abs(expected))).all()
    finally:
        library.stop_threads()


def test_a_table_of_blocks_gives_the_numbers_that_they_stand_for(c_library: CpuLibrary) -> None:
    library = c_library
    rng, width, layers, vocab = np.random.default_rng(7), 64, 2, 9
    data = random_blocks("Q8_0", vocab * layers * width // 32, 1).reshape(vocab * layers, -1)
    dense = rounded(dequantize(data.reshape(-1), "Q8_0").reshape(-1, width), BFLOAT16)
    projection = PackedMatrix(library, rounded(np.zeros((layers * width, 16), np.float32), BFLOAT16), dtype=BFLOAT16)
    x = rounded(rng.standard_normal((vocab, width), np.float32), BFLOAT16)
    results = []
    for table in (dense, BlockRows("Q8_0", data)):
        lookup = CpuEmbedding(library, table, 0.5)
        inputs = CpuPerLayerInputs(library, lookup, projection, norm=np.ones(width, np.float32), eps=EPS)
        projected = inputs.project(np.zeros((vocab, 16), np.float32))
        results.append(inputs.multiply(x.copy(), np.arange(vocab), projected, 1).tobytes())
    assert results[0] == results[1]
