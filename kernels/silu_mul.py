"""The gated activation of Llama's MLP: silu(gate) * up (Shazeer 2020, arXiv 2002.05202, SwiGLU)."""

import torch

from kernels.whole_vectors import LANES, in_whole_vectors

SILU_ = torch._C._nn.silu_

#: Numbers worked on at once, so that float32 intermediates stay in a core's cache and need no fresh memory.
_BLOCK = 1 << 18


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I] -> [T, I], the same dtype; float32 inside, rounded once."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    rows = max(1, _BLOCK // width)
    out = gate_up.new_empty(num_rows, width)
    for first in range(0, num_rows, rows):
        gate, up = gate_up[first : first + rows].chunk(2, -1)
        padded = torch.zeros(len(gate), -(-width // LANES) * LANES)
        inner = padded[:, :width]
        inner.copy_(gate)
        in_whole_vectors(SILU_, padded)
        torch.mul(inner, up, out=inner)
        out[first : first + rows] = inner
    return out
