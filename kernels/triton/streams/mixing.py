"""Hidden states in several streams in Triton: a layer predicts all of them, and corrects them by what it has changed.

A stream is [T, d] float32, and all of a step are one tensor [streams, T, d]. The weight of a stream is the sum of the
router's numbers, after their tanh, times coefficients. core/models/operations/stream_arithmetic.py has the definitions.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.arithmetic.elementary import hyperbolic_tangent
from kernels.triton.arithmetic.sums import sum_of
from kernels.triton.device import power_of_2

_MAX_BLOCK = 1024
_ROOT_HALF = tl.constexpr(0.5**0.5)
#: Of a stream that is scaled: the mean of its squares counts as at least this.
_LEAST_SQUARE = tl.constexpr(1e-5)


# fmt: off
@triton.jit
def _routed(logits, token, COUNT: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return the router's numbers [BLOCK_S] of a token; beyond COUNT they are 0."""
    k = tl.arange(0, BLOCK_S)
    return hyperbolic_tangent(tl.load(logits + token * COUNT + k, mask=k < COUNT, other=0.0))


@triton.jit
def _weight(routed, coefficients, COUNT: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return the sum of the router's numbers times coefficients [COUNT]."""
    k = tl.arange(0, BLOCK_S)
    return sum_of(routed * tl.load(coefficients + k, mask=k < COUNT, other=0.0))


@triton.jit(do_not_specialize=["num_rows"])
def predict_kernel(
    streams, logits, coefficients, out, num_rows,
    COUNT: tl.constexpr, BLOCK_S: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute BLOCK numbers of one token in all streams in each program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at, each = token * WIDTH + column, num_rows.to(tl.int64) * WIDTH
    routed = _routed(logits, token, COUNT, BLOCK_S)
    for own in tl.static_range(COUNT):
        total = tl.load(streams + own * each + at, mask=inside, other=0.0)
        for other in tl.static_range(COUNT):
            weight = _weight(routed, coefficients + (own * COUNT + other) * COUNT, COUNT, BLOCK_S)
            total += tl.load(streams + other * each + at, mask=inside, other=0.0) * weight
        tl.store(out + own * each + at, total, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def correct_kernel(
    streams, logits, coefficients, after, out, num_rows,
    ACTIVE: tl.constexpr, COUNT: tl.constexpr, BLOCK_S: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute BLOCK numbers of one token in all streams in each program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at, each = token * WIDTH + column, num_rows.to(tl.int64) * WIDTH
    routed = _routed(logits, token, COUNT, BLOCK_S)
    change = tl.load(after + at, mask=inside, other=0.0) - tl.load(streams + ACTIVE * each + at, mask=inside, other=0.0)
    for own in tl.static_range(COUNT):
        weight = _weight(routed, coefficients + own * COUNT, COUNT, BLOCK_S) + 1.0
        before = tl.load(streams + own * each + at, mask=inside, other=0.0)
        tl.store(out + own * each + at, before + change * weight, mask=inside)


@triton.jit
def join_kernel(active, attended, x, residual, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK numbers of one token in each program."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    learned = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0)
    total = tl.load(active + at, mask=inside, other=0.0) + tl.load(attended + at, mask=inside, other=0.0)
    tl.store(out + at, (total + learned) * _ROOT_HALF, mask=inside)


@triton.jit
def resize_kernel(
    x, like, before, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, PARTS: tl.constexpr
):
    """Compute one row in each program: x of the size of `like`, added to `before` if it ADDS, divided by PARTS."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    numbers = tl.load(x + at, mask=inside, other=0.0)
    theirs = tl.load(like + at, mask=inside, other=0.0)
    size = tl.sqrt_rn(tl.div_rn(sum_of(theirs * theirs), WIDTH * 1.0))
    square = tl.div_rn(sum_of(numbers * numbers), WIDTH * 1.0)
    square = tl.maximum(square, _LEAST_SQUARE, propagate_nan=tl.PropagateNan.ALL)
    result = numbers * tl.div_rn(size, tl.sqrt_rn(square))
    if ADDS:
        result = tl.load(before + at, mask=inside, other=0.0) + result
    if PARTS > 1:
        result = tl.div_rn(result, PARTS * 1.0)
    tl.store(out + at, result, mask=inside)
# fmt: on


def predicted(streams: torch.Tensor, logits: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Return the streams [S, T, d] before a layer. logits [T, S], coefficients [S, S, S]: float32, contiguous."""
    (count, num_rows, width), out = streams.shape, torch.empty_like(streams)
    if num_rows:
        block = min(_MAX_BLOCK, power_of_2(width))
        predict_kernel[(num_rows, triton.cdiv(width, block))](
            streams,
            logits,
            coefficients,
            out,
            num_rows,
            COUNT=count,
            BLOCK_S=power_of_2(count),
            WIDTH=width,
            BLOCK=block,
        )
    return out


def corrected(
    streams: torch.Tensor, logits: torch.Tensor, coefficients: torch.Tensor, after: torch.Tensor, active: int
) -> torch.Tensor:
    """Return the streams [S, T, d] after a layer, which made `after` [T, d] of the active one. coefficients [S, S]."""
    (count, num_rows, width), out = streams.shape, torch.empty_like(streams)
    if num_rows:
        block = min(_MAX_BLOCK, power_of_2(width))
        correct_kernel[(num_rows, triton.cdiv(width, block))](
            streams,
            logits,
            coefficients,
            after,
            out,
            num_rows,
            ACTIVE=active,
            COUNT=count,
            BLOCK_S=power_of_2(count),
            WIDTH=width,
            BLOCK=block,
        )
    return out


def joined(active: torch.Tensor, attended: torch.Tensor, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the sum of all [T, d] times the root of a half, float32. x has any floating type, the others float32."""
    (num_rows, width), out = active.shape, torch.empty_like(active)
    if num_rows:
        block = min(_MAX_BLOCK, power_of_2(width))
        join_kernel[(num_rows, triton.cdiv(width, block))](active, attended, x, residual, out, WIDTH=width, BLOCK=block)
    return out


def resized(
    x: torch.Tensor, like: torch.Tensor, out: torch.Tensor, before: torch.Tensor | None = None, parts: int = 1
) -> torch.Tensor:
    """Write x [T, d] into out with rows of the size of those of `like`, and return out; all float32 and contiguous.

    A row's size is the root of its mean square. before: is added. parts: the result is divided by it.
    """
    num_rows, width = x.shape
    if num_rows:
        resize_kernel[(num_rows,)](
            x,
            like,
            x if before is None else before,
            out,
            WIDTH=width,
            BLOCK=power_of_2(width),
            ADDS=before is not None,
            PARTS=parts,
        )
    return out
