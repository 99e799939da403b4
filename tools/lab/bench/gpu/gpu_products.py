"""The products of weights that stay quantized on a GPU, each beside torch's product of the same weights in bfloat16."""

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import linear

from kernels.torch.packed_rows import PackedRows, pack_blocks, quantize_rows
from tools.lab.bench.gpu.gpu_case import Case
from tools.lab.bench.gpu.gpu_experts import captured

#: Rows of x.
ROWS = (1, 8, 64, 512)


def quantized_products(shapes: dict[str, tuple[int, int]], device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield a case for each shape, name -> (out, in), each form and each number of rows."""
    from kernels.triton.packed_linear import PackedLinear

    for name, (columns, depth) in shapes.items():
        weight = torch.randn(columns, depth, device=device, dtype=dtype) * 0.02
        for form, packed in _forms(weight):
            product = PackedLinear([packed], None, dtype, dtype, form)
            for rows in ROWS:
                x = torch.randn(rows, depth, device=device, dtype=dtype)
                yield Case(
                    f"product {form}",
                    f"{name} {rows}x{depth}x{columns}",
                    captured(partial(product, x)),
                    "linear",
                    captured(partial(linear, x, weight)),
                    packed.num_bytes + rows * (depth + columns) * dtype.itemsize,
                    2 * rows * depth * columns,
                )


def _forms(weight: torch.Tensor) -> Iterator[tuple[str, PackedRows]]:
    """Yield the weight in 8 bits, and codes of its size in 4 bits, of one level of scales and of two."""
    packed = quantize_rows(weight)
    assert packed is not None, "the weights have scales"
    yield "int8", packed
    columns, depth = weight.shape
    for type_name, weights, num_bytes in (("Q4_0", 32, 18), ("Q4_K", 256, 144)):
        if depth % weights == 0:
            blocks = torch.full((columns, depth // weights, num_bytes), 0x21, dtype=torch.uint8)  # scales of 0.01
            yield type_name, pack_blocks(blocks.view(columns, -1).numpy(), type_name, weight.device)
