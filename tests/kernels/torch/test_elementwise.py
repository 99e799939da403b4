"""RMS norm, rotary embedding and the gated activations of torch: right, against float64."""

import numpy as np
import pytest
import torch

from kernels.rotary import rotary_frequencies
from kernels.torch.gated_activation import gelu_tanh_mul, silu_mul
from kernels.torch.kv_cache import TorchKVCache
from kernels.torch.rms_norm import rms_norm
from kernels.torch.rope import rope_kv_write, rotary_tables, rotate
from kernels.torch.tensors import element_type, to_tensor

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [7, 33, 96, 576])
def test_rms_norm(width, dtype):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(300, width, generator=generator) * torch.rand(300, 1, generator=generator) * 9
    weight = torch.randn(width, generator=generator)
    exact = x.double() * torch.rsqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-5) * weight
    got = rms_norm(x, weight, 1e-5, dtype)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 33, 100, 1536])
def test_silu_mul(width, dtype):
    generator = torch.Generator().manual_seed(width)
    x = (torch.randn(300, 2 * width, generator=generator) * 4).to(dtype)
    x[0, 0], x[1, 0] = -300.0, 300.0  # exp overflows to infinity: the quotient is 0
    gate, up = x.double().chunk(2, -1)
    got = silu_mul(x)
    assert got.dtype == dtype
    assert torch.allclose(
        got.double(), gate * gate.sigmoid() * up, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 33, 100, 1536])
def test_gelu_tanh_mul(width, dtype):
    x = (torch.randn(300, 2 * width, generator=torch.Generator().manual_seed(width)) * 4).to(dtype)
    x[0, 0], x[1, 0], x[2, 0] = -300.0, 300.0, -9.0
    gate, up = x.double().chunk(2, -1)
    got = gelu_tanh_mul(x)
    assert got.dtype == dtype
    exact = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert torch.allclose(got.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 2e-6, atol=1e-6)


@pytest.mark.parametrize("head_dim", [4, 24, 64, 256])
def test_rms_norm_of_heads(head_dim):
    """Each head by itself, with a weight of its own, in a view of wider rows."""
    x = torch.randn(300, 7 * head_dim, generator=torch.Generator().manual_seed(head_dim))
    weight = torch.randn(5, head_dim, generator=torch.Generator().manual_seed(1))

    def heads(part):
        return rms_norm(part[:, : 5 * head_dim].view(-1, 5, head_dim), weight, 1e-6, torch.float32)

    whole = heads(x)
    for index in range(5):
        alone = rms_norm(x[:, index * head_dim : (index + 1) * head_dim], weight[index], 1e-6, torch.float32)
        assert torch.allclose(whole[:, index], alone, rtol=1e-6, atol=1e-7)


def test_tables_are_multiplied_by_the_attention_factor():
    positions, frequencies = torch.arange(9), to_tensor(rotary_frequencies(8, 100.0))
    for plain, scaled in zip(
        rotary_tables(positions, frequencies), rotary_tables(positions, frequencies, 1.25), strict=True
    ):
        assert torch.equal(scaled, plain * 1.25)


@pytest.mark.parametrize("head_dim", [2, 10, 64, 80])
def test_rotate(head_dim):
    generator = torch.Generator().manual_seed(head_dim)
    x = torch.randn(300, 5, head_dim, generator=generator)
    positions = torch.arange(300) * 13
    frequencies = to_tensor(rotary_frequencies(head_dim, 10_000.0))
    cos, sin = rotary_tables(positions, frequencies)
    half = head_dim // 2
    turned = torch.view_as_complex(torch.stack((x[..., :half], x[..., half:]), -1).double())
    angles = (positions[:, None].float() * frequencies).double()
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    assert torch.allclose(rotate(x, cos, sin).double(), torch.cat((turned.real, turned.imag), -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_kv_write_stores_what_it_should_where_it_should(dtype):
    cache = TorchKVCache(2, 6, 4, 2, head_dim=8, dtype=element_type(dtype))
    for layer in cache.layers:
        layer[1:] = torch.nan
    qkv = torch.randn(5, (4 + 2 * 2) * 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = rotary_tables(torch.tensor([0, 1, 9, 3, 4]), to_tensor(rotary_frequencies(8, 100.0)))
    slots = torch.tensor([4, 23, -1, 10, 9])
    stored = torch.tensor([0, 1, 3, 4])
    before = qkv.clone()
    q = rope_kv_write(qkv, cos, sin, cache, 1, cache.slot_rows(slots[stored]), stored)
    rotated = rotate(before[:, : 6 * 8].reshape(5, 6, 8), cos, sin)
    assert torch.equal(q, rotated[:, :4])
    assert q.dtype == torch.float32
    keys, values = cache.keys(1).flatten(0, 1), cache.values(1).flatten(0, 1)  # [slots, Hkv, D]
    assert torch.equal(keys[slots[stored]], rotated[stored, 4:].to(dtype))
    assert torch.equal(values[slots[stored]], before[stored, 6 * 8 :].reshape(-1, 2, 8))
    untouched = np.setdiff1d(np.arange(4, 24), slots.numpy())
    assert keys[untouched].isnan().all()
    assert values[untouched].isnan().all()
    assert (cache.layers[1][0] == 0).all()
    assert cache.layers[0][1:].isnan().all()
