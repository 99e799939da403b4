"""PackedLinear: a linear layer whose weights stay quantized in the device's memory, numerics level L0.

Its results are those of DeviceLinear with the weights' dequantized numbers, but for the order of sums: weights are
rounded to x's type as they would be at load, and x is not quantized.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from kernels.torch.packed_rows import PackedRows
from kernels.triton import linear as _precision  # noqa: F401 (it sets the precision of torch's products)
from kernels.triton.packed_product import packed_product
from kernels.triton.unpack import unpack

#: Version of the arithmetic, a part of the fingerprint.
ARITHMETIC = 1
#: Most rows that are multiplied while weights are unpacked. For more, a piece of the matrix is unpacked into a buffer.
MOST_ROWS = 128
#: In float32, whose products have no tensor cores and whose larger tiles have no room in registers.
MOST_FLOAT_ROWS = 16
#: Weights of such a piece: 32 MB in bfloat16, which an H100's L2 cache (50 MB) keeps until it is multiplied.
PIECE = 1 << 24
_ALIGNED = 64  # rows: pieces begin at multiples of 16 bytes


class PackedLinear:
    """The layer y = x @ weight.T + bias; the rows of each part of the weight follow those of the previous one.

    bias [out] of any type; dtype: of x; out_dtype: the result's, to which it is rounded after dtype.
    """

    def __init__(
        self,
        parts: Sequence[PackedRows],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        name: str,
    ) -> None:
        """Keep the parts. name: of the weights' form, for `variant`."""
        self.parts, self.dtype, self.out_dtype = tuple(parts), dtype, out_dtype
        self._most_rows = MOST_FLOAT_ROWS if dtype == torch.float32 else MOST_ROWS
        self.bias = None if bias is None else bias.to(dtype)
        self.out_features = sum(len(part.codes) for part in parts)
        self.variant = f"triton-{name}.{ARITHMETIC}-rows.{self._most_rows}"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x [T, in] -> [T, out] of out_dtype."""
        y = torch.empty(len(x), self.out_features, dtype=self.out_dtype, device=x.device)
        if not len(x):
            return y
        first = 0
        for part in self.parts:
            if len(x) <= self._most_rows:
                packed_product(x.contiguous(), part, self.bias, y, first)
            else:
                self._by_pieces(x, part, y, first)
            first += len(part.codes)
        return y

    def _by_pieces(self, x: torch.Tensor, part: PackedRows, y: torch.Tensor, first: int) -> None:
        """Unpack the part piece by piece and multiply each by torch's product, into y from the column `first` on."""
        step = max(_ALIGNED, PIECE // part.depth // _ALIGNED * _ALIGNED)
        for begin in range(0, len(part.codes), step):
            weight = unpack(part.rows(begin, begin + step), self.dtype)
            columns = slice(first + begin, first + begin + len(weight))
            bias = None if self.bias is None else self.bias[columns]
            if self.out_dtype != self.dtype:
                y[:, columns] = linear(x, weight, bias)
            elif bias is None:
                torch.mm(x, weight.T, out=y[:, columns])
            else:
                torch.addmm(bias, x, weight.T, out=y[:, columns])
