"""The gated activation of Llama's MLP: silu(gate) * up (Shazeer 2020, arXiv 2002.05202, SwiGLU)."""

import torch

#: Numbers worked on at once, so that float32 intermediates stay in a core's cache and need no fresh memory.
_BLOCK = 1 << 16


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I] -> [T, I], the same dtype; float32 inside.

    torch's own silu and sigmoid are not used: they compute a tensor's last few numbers, those that fill no vector
    register, by another exp than the rest, so that a number's bits depend on where it stands. torch.exp does not.
    """
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    rows = max(1, _BLOCK // width)
    if num_rows <= rows:
        return _silu_mul(gate_up).to(gate_up.dtype)
    out = gate_up.new_empty(num_rows, width)
    for first in range(0, num_rows, rows):
        out[first : first + rows] = _silu_mul(gate_up[first : first + rows])
    return out


def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.to(torch.float32, copy=True).chunk(2, -1)
    denominator = gate.neg().exp_().add_(1.0)
    return gate.div_(denominator).mul_(up)
