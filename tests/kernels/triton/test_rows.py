"""Triton's kernels that work row by row equal their torch references: norm, activations, embedding, rope, copies."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import layer_norm

from core.runner.device_tables import DeviceTables
from kernels import rotary
from kernels.elements import FLOAT32
from kernels.rotary import rotary_frequencies
from kernels.torch import activation as plain_activation
from kernels.torch import gated_activation as reference_activation
from kernels.torch import output_gate
from kernels.torch.kv_cache import TorchKVCache
from kernels.torch.norm import TorchNorm
from kernels.torch.rms_norm import rms_norm
from kernels.torch.rope import query_factors, rope_kv_write, rotary_tables
from kernels.torch.tensors import element_type, to_tensor
from kernels.triton import activation
from kernels.triton.embedding import TritonPerLayerInputs, embedding
from kernels.triton.gated_activation import gelu_erf_mul, gelu_tanh_mul, silu_mul
from kernels.triton.kv_cache import TritonKVCache, _runs, copy_blocks
from kernels.triton.linear import DeviceLinear
from kernels.triton.norm import TritonNorm
from kernels.triton.output_gate import open_gates
from kernels.triton.prepare_inputs import prepare_inputs
from kernels.triton.rope import TritonRope
from tests.placed import placed
from tests.triton_device import ANYWHERE, DEVICE, ON_GPU

pytestmark = ANYWHERE

ROOT = Path(__file__).parents[3]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Of one rounding, relative.
ROUNDING = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        got.cpu().double(), expected.cpu().double(), rtol=ROUNDING[dtype], atol=ROUNDING[dtype] / 100
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 37])
def test_norm(dtype: torch.dtype, width: int) -> None:
    x, hidden, weight = random(3, width, dtype=dtype), random(3, width, seed=1), random(width, seed=2)
    norm = TritonNorm(weight, 1e-5, dtype)
    assert_near(norm(x), rms_norm(x.float(), weight, 1e-5, torch.float32), dtype)
    expected = hidden + x
    assert_near(norm.after(hidden, x), rms_norm(expected, weight, 1e-5, torch.float32), dtype)
    assert torch.equal(hidden, expected)
    assert norm(x[:0]).shape == (0, width)


#: How TritonNorm and TorchNorm are made, but for their tensors.
NORMS: dict[str, dict[str, Any]] = {
    "centred": {"is_centred": True},
    "precedes": {"precedes": True, "residual_multiplier": 0.22},
    "multiplied": {"residual_multiplier": 0.22},
    "replaces": {"replaces": True},
}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NORMS)
def test_further_norms(kind: str, dtype: torch.dtype, has_bias: bool) -> None:
    """Far from zero, where the mean of squares and the square of the mean would cancel. x is not centred."""
    x, weight = random(3, 37, dtype=dtype) + 20, random(37, seed=2)
    bias = random(37, seed=3) if has_bias else None
    options = {**NORMS[kind], "is_centred": has_bias or kind == "centred", "bias": bias}
    ours, theirs = TritonNorm(weight, 1e-5, dtype, **options), TorchNorm(weight, 1e-5, torch.float32, **options)
    hidden = random(3, 37, seed=1)
    expected = hidden.clone()
    assert_close = partial(torch.testing.assert_close, rtol=ROUNDING[dtype], atol=max(ROUNDING[dtype] / 100, 1e-5))
    if "replaces" not in options:
        assert_close(ours(x).float(), theirs(x))
    else:
        own = x.float()
        assert torch.equal(ours(own), own.to(dtype))
        assert_close(own, theirs(x.float()))
    assert_close(ours.after(hidden, x).float(), theirs.after(expected, x))
    torch.testing.assert_close(hidden, expected, rtol=4e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_without_a_weight_only_rounds(dtype: torch.dtype) -> None:
    x, hidden = random(3, 37), random(3, 37, seed=1)
    norm = TritonNorm(None, 1e-5, dtype)
    assert_near(norm(x), x, dtype)
    expected = hidden + x
    assert_near(norm.after(hidden, x), expected, dtype)
    assert torch.equal(hidden, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_without_a_gate(dtype: torch.dtype) -> None:
    x = random(2, 1037, dtype=dtype)
    x[0, :5] = torch.tensor([-200.0, 200.0, 0.0, -20.0, -4.0], device=DEVICE)
    for name in ("gelu_tanh", "gelu_erf", "relu_squared"):
        ours, theirs = getattr(activation, name), getattr(plain_activation, name)
        expected = theirs(x.cpu().float().clone()).double()
        torch.testing.assert_close(ours(x).cpu().double(), expected, rtol=ROUNDING[dtype], atol=3e-6)
        assert ours(x[:0]).shape == (0, 1037)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_attentions_output(dtype: torch.dtype) -> None:
    mixed, gates = random(2, 1037, dtype=dtype), random(2, 1037, dtype=dtype, seed=1)
    gates[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -20.0], device=DEVICE)
    expected = output_gate.open_gates(mixed.cpu().float(), gates.cpu().float())
    assert_near(open_gates(mixed, gates), expected, dtype)
    assert open_gates(mixed[:0], gates[:0]).shape == (0, 1037)
    heads, gates = random(3, 4 * 20, dtype=dtype), random(3, 4, dtype=dtype, seed=2)
    assert_near(open_gates(heads.clone(), gates), output_gate.open_gates(heads.cpu(), gates.cpu()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(dtype: torch.dtype) -> None:
    gate_up = random(2, 2 * 37, dtype=dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -20.0], device=DEVICE)
    for ours, theirs in (
        (silu_mul, reference_activation.silu_mul),
        (gelu_tanh_mul, reference_activation.gelu_tanh_mul),
        (gelu_erf_mul, reference_activation.gelu_erf_mul),
    ):
        expected = theirs(gate_up.cpu().float()).double()
        torch.testing.assert_close(ours(gate_up).cpu().double(), expected, rtol=ROUNDING[dtype], atol=3e-6)
        assert ours(gate_up[:0]).shape == (0, 37)


@pytest.mark.parametrize("dtype", DTYPES)
def test_xielu(dtype: torch.dtype) -> None:
    """Numbers near 0, where the series is used, far from it, and without a sign."""
    constants = torch.tensor([0.8, 0.6, 0.5, -1e-6])
    x = torch.tensor([[-90.0, -3.0, -0.6, -0.5, -0.4, -1e-3, -1e-7, 0.0, -0.0, 1e-7, 0.7, 30.0]], dtype=dtype)
    found = activation.xielu(x.to(DEVICE), constants.to(DEVICE))
    wide = x.double()
    below = (torch.expm1(wide.clamp(max=-1e-6)) - wide) * 0.6
    expected = torch.where(wide > 0, wide * wide * 0.8, below) + wide * 0.5
    assert_near(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype: torch.dtype) -> None:
    table, ids = random(11, 20, dtype=dtype), torch.tensor([10, 0, 3, 3], device=DEVICE)
    assert torch.equal(embedding(ids, table=table, scale=1.5), table[ids].float() * 1.5)
    assert embedding(ids[:0], table=table, scale=1.0).shape == (0, 20)
    places, positions = random(9, 20, seed=1), torch.arange(len(ids), device=DEVICE) * 2 % 9
    found = embedding(ids, positions.int(), table=table, scale=1.5, places=places)
    assert torch.equal(found, table[ids].float() * 1.5 + places[positions])
    kinds, own = random(2, 20, seed=2), torch.tensor([0, 1, 1, 0], device=DEVICE)
    found = embedding(ids + 11 * own, positions.int(), table=table, scale=1.5, places=places, kinds=kinds)
    assert torch.equal(found, table[ids].float() * 1.5 + kinds[own] + places[positions])
    assert embedding(-1 - ids, table=table, scale=1.0).isfinite().all()  # a given row replaces it


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_of_single_layers(dtype: torch.dtype) -> None:
    """norm(projection) + table * scale, of each token's layer; an id below 0 has the rows of one token."""
    layers, width, layer = 3, 20, 1
    table, norm, x = (
        random(11, layers * width, dtype=dtype),
        random(width, seed=1),
        random(4, width, dtype=dtype, seed=2),
    )
    weight, hidden, norm = random(layers * width, 16, dtype=dtype, seed=3), random(4, 16, seed=4), random(width, seed=1)
    inputs = TritonPerLayerInputs(table, DeviceLinear(weight), norm, dtype, scale=0.7, eps=1e-4, given_id=5)
    projected, ids = inputs.project(hidden), torch.tensor([10, 0, -1, -7], device=DEVICE)
    words = torch.where(ids < 0, 5, ids)
    own = rms_norm(projected.view(4, layers, width)[:, layer].float(), norm, 1e-4, torch.float32)
    own = own + table.view(11, layers, width)[words, layer].float() * 0.7
    assert_near(inputs.multiply(x, ids, projected, layer), x.float() * own, dtype)
    assert inputs.multiply(x[:0], ids[:0], projected[:0], layer).shape == (0, width)
    alone = TritonPerLayerInputs(None, DeviceLinear(weight), norm, dtype, scale=0.7, eps=1e-4, given_id=5)
    own = rms_norm(projected.view(4, layers, width)[:, layer].float(), norm, 1e-4, torch.float32)
    assert_near(alone.multiply(x, ids, alone.project(hidden), layer), x.float() * own, dtype)


#: The norms of heads: before or after rotation, of whole rows, layer normalisations.
HEAD_NORMS: dict[str, dict[str, Any]] = {
    "heads": {},
    "rows": {"of_rows": True},
    "after": {"is_after": True},
    "centred": {"is_centred": True},
}


def head_norm(x: torch.Tensor, weight: torch.Tensor, heads: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Return heads [T, H + Hkv, D] normalised: the definition."""
    if kind == "centred":
        return layer_norm(x.float(), x.shape[2:], eps=1e-5) * weight
    if kind != "rows":
        return rms_norm(x.float(), weight, 1e-5, torch.float32)
    parts = zip((x[:, :heads], x[:, heads:]), (weight[:heads], weight[heads:]), strict=True)
    normed = [rms_norm(part.flatten(1).float(), own.flatten(), 1e-5, dtype).view_as(part) for part, own in parts]
    return torch.cat(normed, 1).float()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "kind"),
    [(3, 3, 16, None), (8, 1, 80, None), *((6, 2, 20, kind) for kind in HEAD_NORMS)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_cache_write(heads: int, kv_heads: int, head_dim: int, kind: str | None, dtype: torch.dtype) -> None:
    num_tokens, slots = 5, torch.tensor([37, 16, -1, 63, 33])
    qkv = random(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cos, sin = rotary_tables(torch.tensor([0, 1, 5, 90, 4000]), to_tensor(rotary_frequencies(head_dim, 1e4)))
    weight = None if kind is None else random(heads + kv_heads, head_dim, seed=1)
    ours = TritonKVCache(2, 4, 16, kv_heads, head_dim=head_dim, dtype=element_type(dtype), device=DEVICE)
    theirs = TorchKVCache(2, 4, 16, kv_heads, head_dim=head_dim, dtype=element_type(dtype))
    for cache in (ours, theirs):
        for layer in cache.layers:
            layer.fill_(-7)
    q = TritonRope(heads, weight, 1e-5, **HEAD_NORMS.get(kind or "", {}))(
        qkv, cos.to(DEVICE), sin.to(DEVICE), ours, 1, slots.to(DEVICE)
    )

    def normed(x: torch.Tensor) -> torch.Tensor:
        assert weight is not None
        assert kind is not None
        return head_norm(x, weight.cpu(), heads, dtype, kind)

    around = () if kind is None else (torch.Tensor.float, normed) if kind == "after" else (normed,)
    stored = torch.nonzero(slots >= 0).flatten()
    rows = theirs.slot_rows(slots[stored])
    expected = rope_kv_write(qkv.cpu().clone(), cos, sin, theirs, 1, rows, stored, *around)
    # The interpreter cuts bfloat16 off where a GPU rounds.
    if weight is None and (ON_GPU or dtype != torch.bfloat16):
        assert torch.equal(q.cpu(), expected.to(dtype))
        assert torch.equal(ours.layers[1].cpu(), theirs.layers[1])
    elif kind == "rows":  # rounded twice, and a rotation may cancel what was rounded first
        for mine, other in ((q, expected), (ours.layers[1], theirs.layers[1])):
            torch.testing.assert_close(mine.cpu().float(), other.float(), rtol=0, atol=6 * ROUNDING[dtype])
    else:
        assert_near(q, expected, dtype)
        assert_near(ours.layers[1], theirs.layers[1], dtype)
    assert (ours.layers[0] == -7).all()


def test_some_heads_of_rows_that_are_normalised_as_a_whole() -> None:
    """They have the bits of the kernel for all heads; V is of these only."""
    heads, kv_heads, size = 6, 3, 16
    qkv, weight = random(3, (heads + 2 * kv_heads) * size), random(heads + kv_heads, size, seed=1)
    slots = torch.tensor([17, -1, 33], device=DEVICE)
    angles = rotary_tables(torch.tensor([0, 5, 90]), to_tensor(rotary_frequencies(size, 1e4)))
    cos, sin = (table.to(DEVICE) for table in angles)

    def run(count: int, kv_count: int, x: torch.Tensor, **part: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cache = TritonKVCache(1, 4, 16, kv_count, head_dim=size, dtype=FLOAT32, device=DEVICE)
        cache.layers[0].fill_(-7)
        q = TritonRope(count, weight, 1e-5, of_rows=True, **part)(x, cos, sin, cache, 0, slots)
        return q, cache.layers[0]

    queries, stored = run(heads, kv_heads, qkv)
    values = (heads + kv_heads) * size
    own = torch.cat((qkv[:, :values], qkv[:, values + size : values + 2 * size]), 1)
    some, kept = run(2, 1, own, row=(heads, kv_heads, 2, 1))
    assert torch.equal(some, queries[:, 2:4])
    assert torch.equal(kept, stored[:, :, 1:2])
    assert not torch.equal(stored[:, :, 1], stored[:, :, 0])


def test_queries_that_grow() -> None:
    """The factors are NumPy's; a query is multiplied before it is rounded, and nothing else is."""
    positions = torch.tensor([0, 99, 100, 399, 400, -1])
    factors = query_factors(positions, 0.1, 100)
    expected = rotary.query_factors(positions.numpy().clip(0), 0.1, 100)
    np.testing.assert_allclose(factors.numpy(), expected, rtol=1e-7)
    assert factors.tolist()[2] > factors.tolist()[1] == 1.0
    cache = TritonKVCache(2, 4, 16, 1, head_dim=16, dtype=FLOAT32, device=DEVICE)
    qkv, slots = random(6, 4 * 16), torch.arange(16, 22, device=DEVICE)
    cos, sin = (table.to(DEVICE) for table in rotary_tables(positions, to_tensor(rotary_frequencies(16, 1e4))))
    rope = TritonRope(2)
    plain, grown = (rope(qkv, cos, sin, cache, layer, slots, of) for layer, of in enumerate((None, factors.to(DEVICE))))
    assert torch.equal(grown.cpu(), plain.cpu() * factors[:, None, None])
    assert torch.equal(cache.layers[0][1, :, :, :6], cache.layers[1][1, :, :, :6])


def test_products_are_not_cut_to_fewer_bits() -> None:
    """Also where the environment asks for it, as in NVIDIA's containers."""
    code = (
        "import torch; import kernels.triton.linear; m = torch.backends.cuda.matmul; print(m.fp32_precision, "
        "m.allow_bf16_reduced_precision_reduction, m.allow_fp16_reduced_precision_reduction)"
    )
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", placed(code)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["ieee", "False", "False"]


def test_columns_are_sent_at_places_that_kernels_are_compiled_for() -> None:
    tables = DeviceTables(1, 8, TritonKVCache(1, 2, 4, 1, head_dim=16, dtype=FLOAT32, device=DEVICE))
    columns = [np.arange(count) for count in (3, 0, 4, 1, 5)]
    sent = tables.send_columns(columns)
    assert [column.tolist() for column in sent] == [column.tolist() for column in columns]
    assert {column.dtype for column in sent} == {torch.int32}
    assert {column.data_ptr() % 16 for column in sent} == {0}


def test_inputs_come_from_the_device_tables() -> None:
    tokens = torch.arange(40, dtype=torch.int32, device=DEVICE).view(4, 10)
    blocks = torch.tensor([[5, 6, 0], [7, 1, 9], [2, 3, 4], [8, 0, 0]], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([2, 2, 1, -1, 3], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([3, 4, 9, -1, 0], dtype=torch.int32, device=DEVICE)
    ids, slots = prepare_inputs(rows, positions, tokens, blocks, 4)
    assert ids.tolist() == [23, 24, 19, 0, 30]
    assert slots.tolist() == [2 * 4 + 3, 3 * 4, 9 * 4 + 1, -1, 32]
    assert [part.tolist() for part in prepare_inputs(rows[:0], positions[:0], tokens, blocks, 4)] == [[], []]


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_copies(dtype: torch.dtype) -> None:
    source, target = random(6, 2, 3, 4, 20, dtype=dtype), random(5, 2, 3, 4, 20, dtype=dtype, seed=1)
    before = target.clone()
    sources, targets = torch.tensor([[5, 1, 1], [0, 4, 2]], dtype=torch.int32, device=DEVICE).unbind(0)
    copy_blocks(source, sources[:0], target, targets[:0])
    assert torch.equal(target, before)
    copy_blocks(source, sources, target, targets)
    assert torch.equal(target[[0, 4, 2]], source[[5, 1, 1]])
    assert torch.equal(target[[1, 3]], before[[1, 3]])


@pytest.mark.parametrize("in_host_memory", [False, True])
def test_copies_between_caches(in_host_memory: bool) -> None:
    """Within the device, and to pinned memory and back."""
    cache = TritonKVCache(2, 6, 4, 1, head_dim=16, dtype=FLOAT32, device=DEVICE)
    place = torch.device("cpu") if in_host_memory else DEVICE
    pool = TritonKVCache(2, 4, 4, 1, head_dim=16, dtype=FLOAT32, device=place, pinned=in_host_memory and ON_GPU)
    for index, layer in enumerate((*cache.layers, *pool.layers)):
        layer[1:] = random(*layer[1:].shape, seed=index).to(layer.device)
    expected = [layer[[4, 2, 3]].clone() for layer in cache.layers]
    none = np.zeros(0, np.int32)
    cache.copy_blocks(none, pool, none)
    cache.copy_blocks(np.array([4, 2, 3], np.int32), pool, np.array([1, 2, 3], np.int32))
    pool.copy_blocks(np.array([2, 3, 1], np.int32), cache, np.array([1, 2, 3], np.int32))
    for layer, (first, second, third) in zip(cache.layers, expected, strict=True):
        assert torch.equal(layer[1], second)
        assert torch.equal(layer[2], third)
        assert torch.equal(layer[3], first)


def test_blocks_that_stand_together_are_one_transfer() -> None:
    assert _runs(np.array([4, 2, 3, 4, 9]), np.array([1, 2, 3, 4, 5])) == [(4, 1, 1), (2, 2, 3), (9, 5, 1)]
    assert _runs(np.zeros(0, np.int32), np.zeros(0, np.int32)) == []
