"""Rotary position embedding, half-split ("neox") layout (Su et al. 2021, arXiv 2104.09864), and the KV cache write."""

from collections.abc import Callable

import torch

from kernels.torch.kv_cache import TorchKVCache
from kernels.value_form import SIDES, ValueForm


def rotary_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute positions [T] int64 -> cos, sin [T, 1, head_dim] float32, times factor.

    sin includes the sign of its half: (-sin, +sin). A pair with the frequency 0 is not rotated: its cosine is 1.
    """
    angles = positions[:, None].float() * frequencies
    # In float64, rounded once: in float32 the last bit depends on the CPU model and on the position in the tensor.
    angles = angles.double()
    factors = torch.where(frequencies == 0, 1.0, factor)
    cos, sin = angles.cos().float().mul_(factors), angles.sin().float().mul_(factors)
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def query_factors(positions: torch.Tensor, growth: float, length: float) -> torch.Tensor:
    """Compute the factors [T] float32 for queries at positions [T], like kernels.rotary.query_factors.

    A position below 0, which is padding, has factor 0.
    """
    return (1 + growth * torch.log1p(torch.floor(positions.clamp(min=0).double() / length))).float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, H, D] -> [T, H, D] float32: turn each pair (x[i], x[i + D/2]) by its angle."""
    x = x.float()
    # Two products and a sum, each rounded: torch would use a fused multiply-add for only some positions.
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


def rope_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: TorchKVCache,
    layer: int,
    write_rows: torch.Tensor,
    write_tokens: torch.Tensor | slice,
    before: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float,
    after: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float,
    *,
    values: ValueForm = "own",
    value_norm: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float,
) -> torch.Tensor:
    """Rotate Q and K, store K and V; return Q [T, H, D] float32.

    before maps the heads of Q and K, [T, H + Hkv, D] in the cache's dtype, to the float32 values to rotate; after
    maps those that are rotated. qkv [T, (H
    + 2 * Hkv) * D] is in the cache's dtype; cos and sin come from rotary_tables. write_tokens picks the tokens that
    have a slot, write_rows = cache.slot_rows(their slots). K may be overwritten in qkv. values: what V is, and how many
    columns of K and V there are (kernels/value_form.py). value_norm: of V's heads [T, Hkv, D], where it is normalised.
    """
    kv_width, head_dim = cache.num_kv_heads * cache.head_dim, cache.head_dim
    q_width = qkv.shape[1] - SIDES[values] * kv_width
    num_rotated = qkv.shape[1] if values == "shared" else q_width + kv_width
    rotated = after(rotate(before(qkv[:, :num_rotated].reshape(len(qkv), -1, head_dim)), cos, sin))
    num_heads = q_width // head_dim
    if values == "shared":
        return rotated[:, :num_heads]
    kv = qkv[:, q_width:]
    if values != "own":
        v = value_norm(kv[:, -kv_width:].reshape(len(qkv), -1, head_dim)).flatten(1).to(qkv.dtype)
        kv = torch.cat((kv[:, :kv_width], v), 1)
    kv[:, :kv_width] = rotated[:, num_heads:].flatten(1)
    cache.write(layer, write_rows, kv[write_tokens])
    return rotated[:, :num_heads]
