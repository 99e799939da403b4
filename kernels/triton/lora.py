"""Low-rank adapters (LoRA) in Triton: what the adapters of a step's tokens add to a product, for all adapters at once.

y += b @ (scale * (a @ x)) in float32, after the product was rounded to its dtype, and rounded again, as PEFT does. All
tokens of a program have one adapter. What a token gets is one chain of sums in each of the two products, in ascending
order, so no bit depends on other tokens or on the shape of tiles; see dot() in device.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.arrays import AnyInts, Ints
from kernels.elements import Dtype
from kernels.low_rank import LowRank, ProductShape
from kernels.rounding import ceil_div, round_up
from kernels.torch.tensors import DTYPES, to_tensor
from kernels.triton.device import dot

#: Ranks are padded with zeros to multiples of what tensor cores multiply.
RANK_STEP = 16
#: Tokens of a program, by the most tokens with adapters for which that is used.
TILE_TOKENS = {64: 16, 1 << 62: 64}
#: Columns of a program's result, and how many neighbours of K it loads at a time: 16-bit floats, and others.
TILE_COLUMNS, DEPTH, FLOAT_DEPTH = 64, 64, 16


class TritonAdapter:
    """The matrices of one adapter for all products of a model, in the order of `shapes`, in a device's memory.

    products: for each product, the parts that the adapter changes; None = not this one. The parts of a product are
    joined: b has zeros between the columns of one part and the ranks of another.
    """

    def __init__(
        self,
        shapes: Sequence[ProductShape],
        products: Sequence[Sequence[LowRank | None]],
        dtype: Dtype,
        device: torch.device,
    ) -> None:
        pairs = [_joined(shape, parts) for shape, parts in zip(shapes, products, strict=True)]
        self.ranks = np.array([len(pair.a) for pair in pairs], np.int32)
        self._matrices = [
            None
            if not len(pair.a)
            else (pair.a.to(device, DTYPES[dtype]), pair.b.to(device, DTYPES[dtype]), pair.scales.to(device))
            for pair in pairs
        ]
        #: [products, 3] addresses of a, b and the scales.
        self.addresses = np.array(
            [[0] * 3 if one is None else [part.data_ptr() for part in one] for one in self._matrices], np.int64
        )
        self.num_bytes = sum(part.nbytes for one in self._matrices if one is not None for part in one)


def adapter_bytes(shapes: Sequence[ProductShape], rank: int, dtype: Dtype) -> int:
    """Return the bytes of an adapter that changes all products of these shapes, whose matrices have this rank."""
    ranks = [round_up(rank * len(shape.parts), RANK_STEP) for shape in shapes]
    widths = [shape.depth + sum(shape.parts) for shape in shapes]
    of_numbers, of_scales = DTYPES[dtype].itemsize, torch.float32.itemsize
    return sum(one * (width * of_numbers + of_scales) for one, width in zip(ranks, widths, strict=True))


class _Pair(NamedTuple):
    """An adapter's part of one product: a [rank, depth], b [columns, rank], scales [rank]; float32."""

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor


def _joined(shape: ProductShape, parts: Sequence[LowRank | None]) -> _Pair:
    rank = round_up(sum(len(part.a) for part in parts if part is not None), RANK_STEP)
    a, b, scales = (torch.zeros(size) for size in ((rank, shape.depth), (sum(shape.parts), rank), (rank,)))
    first = column = 0
    for part, size in zip(parts, shape.parts, strict=True):
        if part is not None:
            ranks, columns = slice(first, first + len(part.a)), slice(column, column + size)
            a[ranks], b[columns, ranks], scales[ranks] = (
                to_tensor(part.a).float(),
                to_tensor(part.b).float(),
                part.scale,
            )
            first += len(part.a)
        column += size
    return _Pair(a, b, scales)


class LoraWork(NamedTuple):
    """The tokens of a step that have adapters, in tiles of one adapter each. On the device, except for ranks."""

    tokens: torch.Tensor  # [tiles, tokens of a tile] int32; -1 = none
    adapters: torch.Tensor  # [tiles] int32, indices of the tiles' adapters
    addresses: torch.Tensor  # [products, adapters, 3] int64: TritonAdapter.addresses
    ranks: torch.Tensor  # [products, adapters] int32; 0 = the product is not changed
    most: list[int]  # [products] the largest rank of any adapter


def lora_work(packed: Sequence[TritonAdapter], of_token: Ints, device: torch.device) -> LoraWork:
    """Return the work of a step. packed: the distinct adapters; of_token [T]: index in packed, -1 = none."""
    counts = np.bincount(of_token[of_token >= 0], minlength=len(packed))
    total = int(counts.sum())
    size = next(tokens for most, tokens in TILE_TOKENS.items() if total <= most)
    num_tiles = ceil_div(counts, size)
    place = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)  # of a token among those of its adapter
    tile = np.repeat(np.cumsum(num_tiles) - num_tiles, counts) + place // size
    tokens = np.full((int(num_tiles.sum()), size), -1, np.int32)
    tokens[tile, place % size] = np.argsort(of_token, kind="stable")[len(of_token) - total :]
    ranks = np.stack([adapter.ranks for adapter in packed], 1)
    return LoraWork(
        tokens=_sent(tokens, device),
        adapters=_sent(np.repeat(np.arange(len(packed), dtype=np.int32), num_tiles), device),
        addresses=_sent(np.stack([adapter.addresses for adapter in packed], 1), device),
        ranks=_sent(ranks, device),
        most=ranks.max(1).tolist(),
    )


def compile_adapters(shapes: Sequence[ProductShape], dtype: Dtype, device: torch.device) -> None:
    """Launch the kernels for products of these shapes, with an adapter of zeros, so that they are compiled."""
    for shape in set(shapes):
        size = sum(shape.parts)
        zeros = LowRank(np.zeros((1, shape.depth), np.float32), np.zeros((size, 1), np.float32), 0.0)
        whole = shape._replace(parts=(size,))
        packed = [TritonAdapter([whole], [[zeros]], dtype, device)]
        for num_tokens in (1, 1 + min(TILE_TOKENS)):
            work = lora_work(packed, np.zeros(num_tokens, np.int64), device)
            x, y = (torch.zeros(num_tokens, width, dtype=DTYPES[dtype], device=device) for width in (shape.depth, size))
            add_adapters(x, y, work, 0)


def _sent(column: AnyInts, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(column))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


# fmt: off
@triton.jit
def lower_kernel(
    x, tokens, adapters, addresses, ranks, out, depth, stride,
    SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):
    """Compute BLOCK_R numbers of scale * (a @ x) for the SIZE tokens of a tile. out: [tokens of tiles, stride]."""
    tile, adapter = tl.program_id(0), tl.load(adapters + tl.program_id(0)).to(tl.int64)
    rank = tl.load(ranks + adapter)
    if tl.program_id(1) * BLOCK_R >= rank:
        return
    number = x.dtype.element_ty
    a = tl.load(addresses + adapter * 3).to(tl.pointer_type(number))
    scales = tl.load(addresses + adapter * 3 + 2).to(tl.pointer_type(tl.float32))
    slot = tile * SIZE + tl.arange(0, SIZE)
    token = tl.maximum(tl.load(tokens + slot), 0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    weights_at = a + row.to(tl.int64)[:, None] * depth + k[None, :]
    numbers_at = x + token[None, :] * depth + k[:, None]
    sums = tl.zeros((BLOCK_R, SIZE), tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN:
            weights = tl.load(weights_at + start)
            numbers = tl.load(numbers_at + start)
        else:
            weights = tl.load(weights_at + start, mask=(start + k < depth)[None, :], other=0.0)
            numbers = tl.load(numbers_at + start, mask=(start + k < depth)[:, None], other=0.0)
        sums = dot(weights, numbers, sums)
    sums *= tl.load(scales + row)[:, None]
    tl.store(out + slot.to(tl.int64)[None, :] * stride + row[:, None], sums)


@triton.jit
def raise_kernel(
    lowered, tokens, adapters, addresses, ranks, y, num_columns, stride,
    SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """Add b @ lowered to BLOCK_C columns of y for the tokens of a tile."""
    tile, adapter = tl.program_id(0), tl.load(adapters + tl.program_id(0)).to(tl.int64)
    rank = tl.load(ranks + adapter)
    if rank == 0:
        return
    b = tl.load(addresses + adapter * 3 + 1).to(tl.pointer_type(y.dtype.element_ty))
    slot = tile * SIZE + tl.arange(0, SIZE)
    token = tl.load(tokens + slot)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    weights_at = b + tl.minimum(column, num_columns - 1).to(tl.int64)[:, None] * rank + r[None, :]
    numbers_at = lowered + slot.to(tl.int64)[None, :] * stride + r[:, None]
    sums = tl.zeros((BLOCK_C, SIZE), tl.float32)
    for start in range(0, rank, BLOCK_R):
        sums = dot(tl.load(weights_at + start).to(tl.float32), tl.load(numbers_at + start), sums)
    at = y + tl.maximum(token, 0).to(tl.int64)[None, :] * num_columns + column[:, None]
    inside = (column < num_columns)[:, None] & (token >= 0)[None, :]
    sums += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, sums.to(y.dtype.element_ty), mask=inside)
# fmt: on


def add_adapters(x: torch.Tensor, y: torch.Tensor, work: LoraWork, number: int) -> None:
    """Add what the tokens' adapters add to product `number` of x [T, in] to y [T, out], in place."""
    if not (most := work.most[number]):
        return
    assert x.is_contiguous(), x.stride()
    assert y.is_contiguous(), y.stride()
    (num_tiles, size), depth, columns = work.tokens.shape, x.shape[1], y.shape[1]
    lowered = torch.empty(num_tiles * size, most, dtype=torch.float32, device=x.device)
    block = DEPTH if x.dtype.itemsize == 2 else FLOAT_DEPTH
    sizes = {"SIZE": size, "BLOCK_R": RANK_STEP}
    lower_kernel[num_tiles, most // RANK_STEP](
        x,
        work.tokens,
        work.adapters,
        work.addresses[number],
        work.ranks[number],
        lowered,
        depth,
        most,
        BLOCK_K=block,
        EVEN=depth % block == 0,
        **sizes,
    )
    raise_kernel[num_tiles, ceil_div(columns, TILE_COLUMNS)](
        lowered,
        work.tokens,
        work.adapters,
        work.addresses[number],
        work.ranks[number],
        y,
        columns,
        most,
        BLOCK_C=TILE_COLUMNS,
        **sizes,
    )
