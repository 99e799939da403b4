"""The weighted sum of a token's experts in Triton, ordered by expert; see kernels/torch/experts.py."""

import torch
import triton
import triton.language as tl

from kernels.triton.arithmetic.elementary import exponential

_BLOCK = 512


# fmt: off
@triton.jit
def sum_kernel(
    results, weights, shared, logits, out,
    WIDTH: tl.constexpr, NUM_CHOSEN: tl.constexpr, COLUMNS: tl.constexpr, HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute BLOCK numbers of one token per program. The token's last logit is for the shared expert's gate."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(NUM_CHOSEN):
        pair = row * NUM_CHOSEN + place
        result = tl.load(results + pair * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        total += result * tl.load(weights + pair)
    if HAS_SHARED:
        result = tl.load(shared + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            logit = tl.load(logits + row * COLUMNS + COLUMNS - 1)
            result = tl.div_rn(result, 1.0 + exponential(-logit))
        total += result
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)
# fmt: on


def expert_sum(
    results: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor, shared: torch.Tensor | None, *, has_gate: bool
) -> torch.Tensor:
    """Return the sum [T, d] of results [T * num_chosen, d] times weights [T, num_chosen], with the results' dtype.

    shared [T, d] is added, weighted by the sigmoid of the last of logits [T, C] if has_gate; None: nothing is added.
    """
    (num_rows, num_chosen), width = weights.shape, results.shape[1]
    out = results.new_empty(num_rows, width)
    sum_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        results,
        weights,
        results if shared is None else shared,
        logits,
        out,
        WIDTH=width,
        NUM_CHOSEN=num_chosen,
        COLUMNS=logits.shape[1],
        HAS_SHARED=shared is not None,
        HAS_GATE=has_gate,
        BLOCK=_BLOCK,
    )
    return out
