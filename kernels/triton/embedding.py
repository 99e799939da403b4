"""Rows of embeddings in Triton: of tables, with those of kinds and positions; given ones; inputs of single layers."""

import torch
import triton
import triton.language as tl

from kernels.triton.arithmetic.sums import sum_of
from kernels.triton.device import power_of_2
from kernels.triton.fp8.fp8_linear import Fp8Linear
from kernels.triton.linear import DeviceLinear
from kernels.triton.packed_linear import PackedLinear

_MAX_BLOCK = 1024


# fmt: off
@triton.jit(do_not_specialize=["num_words"])
def gather_kernel(
    ids, positions, table, places, kinds, out, scale, num_words,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_PLACES: tl.constexpr, HAS_KINDS: tl.constexpr,
):
    """Compute BLOCK numbers of one row in each program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    token = tl.maximum(tl.load(ids + row), 0)  # an id below 0 stands for a given row
    word = token
    if HAS_KINDS:
        word = token % num_words
    values = tl.load(table + word * WIDTH + column, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_KINDS:
        values += tl.load(kinds + token // num_words * WIDTH + column, mask=inside, other=0.0)
    if HAS_PLACES:  # padding has position -1
        place = tl.maximum(tl.load(positions + row), 0).to(tl.int64)
        values += tl.load(places + place * WIDTH + column, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + column, values, mask=inside)
# fmt: on


def embedding(
    ids: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    table: torch.Tensor,
    scale: float,
    places: torch.Tensor | None = None,
    kinds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rows of a table times scale, [T, d] float32; ids [T] int64, table [V, d] contiguous.

    kinds [k, d] float32: rows that are added by kind of token; ids of kind k are offset by k * V. places [P, d]
    float32: rows that are then added by positions [T], which only a table of places needs. An id below 0 gets any row.
    """
    assert table.is_contiguous(), table.stride()
    assert places is None or positions is not None, "rows are added by position"
    width = table.shape[1]
    out = torch.empty((len(ids), width), dtype=torch.float32, device=table.device)
    block = min(_MAX_BLOCK, power_of_2(width))
    if len(ids):
        gather_kernel[(len(ids), triton.cdiv(width, block))](
            ids,
            ids if positions is None else positions,
            table,
            table if places is None else places,
            table if kinds is None else kinds,
            out,
            scale,
            len(table),
            WIDTH=width,
            BLOCK=block,
            HAS_PLACES=places is not None,
            HAS_KINDS=kinds is not None,
        )
    return out


# Rows that are given for some tokens.


# fmt: off
@triton.jit(do_not_specialize=["stride"])
def put_kernel(places, rows, target, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write BLOCK numbers of one row in each program, if the row has a place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + row)
    inside = column < tl.where(place >= 0, WIDTH, 0)
    numbers = tl.load(rows + row * stride + column, mask=inside, other=0.0)
    tl.store(target + tl.maximum(place, 0) * WIDTH + column, numbers.to(target.dtype.element_ty), mask=inside)
# fmt: on


def put_rows(target: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [n, d] to these distinct places [n] int64 of target [T, d], which is contiguous. -1 = padding."""
    (count, width), block = rows.shape, min(_MAX_BLOCK, power_of_2(rows.shape[1]))
    assert target.is_contiguous(), target.stride()
    assert rows.stride(1) == 1, rows.stride()
    if count:
        put_kernel[(count, triton.cdiv(width, block))](places, rows, target, rows.stride(0), WIDTH=width, BLOCK=block)


# The inputs that each layer has for each token (kernels/cpu/c/layers/per_layer.h defines them).


# fmt: off
@triton.jit(do_not_specialize=["given_id", "layer"])
def per_layer_kernel(
    x, ids, projected, table, norm, out, scale, eps, given_id, layer,
    LAYERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_TABLE: tl.constexpr,
):
    """Multiply one token's row in each program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    number = tl.load(projected + (token * LAYERS + layer) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(sum_of(number * number), WIDTH * 1.0) + eps))
    own = tl.zeros((BLOCK,), tl.float32)
    if HAS_TABLE:
        word = tl.load(ids + token)
        word = tl.where(word < 0, given_id, word)  # an id below 0 stands for a given row
        own = tl.load(table + (word * LAYERS + layer) * WIDTH + column, mask=inside, other=0.0).to(tl.float32) * scale
    own += number * factor * tl.load(norm + column, mask=inside, other=0.0)
    result = tl.load(x + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32) * own
    tl.store(out + token * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)
# fmt: on


class TritonPerLayerInputs:
    """norm(projection) + table * scale, for each token and layer; without a table the former alone."""

    def __init__(
        self,
        table: torch.Tensor | None,
        projection: DeviceLinear | PackedLinear | Fp8Linear,
        norm: torch.Tensor,
        dtype: torch.dtype,
        *,
        scale: float,
        eps: float,
        given_id: int,
    ) -> None:
        """Take the weights.

        table [vocab, layers * width] of the model's dtype, None = there is none; norm [width] float32; dtype: that of
        the model; given_id: the token whose rows of the table those with ids below 0 have.
        """
        self._table = None if table is None else table.contiguous()
        self._norm, self._projection, self._dtype = norm.contiguous(), projection, dtype
        self._scale, self._eps, self._given_id = scale, eps, given_id
        self.variant = projection.variant

    def project(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the projection [T, layers * width] of embeddings [T, hidden] float32."""
        return self._projection(embedded.to(self._dtype))

    def multiply(self, x: torch.Tensor, ids: torch.Tensor, projected: torch.Tensor, layer: int) -> torch.Tensor:
        """Return x [T, width] times the layer's inputs of the tokens ids [T] int64, rounded once to its dtype."""
        width, out = len(self._norm), torch.empty_like(x)
        assert x.is_contiguous(), x.stride()
        if len(x):
            per_layer_kernel[(len(x),)](
                x,
                ids,
                projected,
                self._norm if self._table is None else self._table,
                self._norm,
                out,
                self._scale,
                self._eps,
                self._given_id,
                layer,
                LAYERS=projected.shape[1] // width,
                WIDTH=width,
                BLOCK=power_of_2(width),
                HAS_TABLE=self._table is not None,
            )
        return out
