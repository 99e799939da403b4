"""PackedMatrix: a weight matrix in the C kernel's layout, multiplied with any number of rows (kernels/cpu/gemm.h)."""

import ctypes

import torch

from kernels.cpu.library import ELEMENT_TYPES, CpuLibrary
from kernels.cpu.structs import GemmArguments, PackArguments

#: Gated activations by their names in transformers; enum in gate.h.
GATES = {"silu": 1, "gelu_pytorch_tanh": 2}


class PackedMatrix:
    """A packed weight matrix that computes y = x @ weight.T + bias.

    `weight` [out, in] is float32, bfloat16 or float16. It is packed as `dtype`, and the original is not kept.

    An element of y is one float32 sum in a fixed order, plus the bias [out] float32, rounded once to out_dtype. Its
    bits do not depend on the number of rows, the row's place among them, or the number of threads.

    bfloat16 weights take 12 bits each, without loss, if the instruction set can unpack them fast (is_compact; see
    kernels/cpu/compact.h). Such a `packed` contains its own addresses and must not be moved. `is_kept` says that the
    CPU's caches keep the weights from one product to the next. Compact weights gain nothing then.

    With `gate`, weight is [2 * out, in]: the gates, then the values they scale (up). y = f(gate) * up; gate and up are
    rounded to out_dtype first.
    """

    def __init__(
        self,
        library: CpuLibrary,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,  # float32 or bfloat16; None = the weight's dtype
        out_dtype: torch.dtype | None = None,  # float32 or bfloat16; None = dtype
        gate: str | None = None,  # a name in GATES
        is_kept: bool = False,
    ) -> None:
        assert gate is None or bias is None, gate
        num_columns, self.in_features = weight.shape
        self.out_features = num_columns if gate is None else num_columns // 2
        self.dtype = dtype or weight.dtype
        self.out_dtype = out_dtype or self.dtype
        self.variant = f"c-{library.variant}"  # identifies the arithmetic: it determines the bits of a product
        self.bias = None if bias is None else bias.float().contiguous()
        self.packed, self.is_compact = _pack(library, weight, self.dtype, gate is not None, is_kept)
        self._gemm = library.function("gemm", ctypes.POINTER(GemmArguments))
        #: The C struct. Still unset: x, y, their rows and strides, and the next product.
        self.arguments = GemmArguments(
            weights=self.packed.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            num_columns=num_columns,
            depth=self.in_features,
            dtype=ELEMENT_TYPES[self.dtype],
            y_dtype=ELEMENT_TYPES[self.out_dtype],
            gate=0 if gate is None else GATES[gate],
            is_compact=self.is_compact,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product [T, out] of out_dtype. x is [T, in] of dtype, and each of its rows is contiguous."""
        assert x.dtype == self.dtype, (x.dtype, self.dtype)
        assert x.shape[1] == self.in_features, (x.shape, self.in_features)
        assert x.stride(1) == 1 or x.shape[1] == 1, x.stride()
        y = torch.empty((x.shape[0], self.out_features), dtype=self.out_dtype)
        arguments = self.arguments
        arguments.x, arguments.y = x.data_ptr(), y.data_ptr()
        arguments.num_rows, arguments.x_stride, arguments.y_stride = x.shape[0], x.stride(0), self.out_features
        self._gemm(arguments)
        return y


def _pack(
    library: CpuLibrary, weight: torch.Tensor, dtype: torch.dtype, is_gated: bool, is_kept: bool
) -> tuple[torch.Tensor, bool]:
    """Pack a weight [out, in] of any strides. Return its bytes, and whether they are compact."""
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    pointer = ctypes.POINTER(PackArguments)
    plan_bytes = library.function("compact_plan_bytes", ctypes.c_int64, result=ctypes.c_int64)
    plan = torch.empty(plan_bytes(weight.shape[0]), dtype=torch.uint8)
    arguments = PackArguments(
        source=weight.data_ptr(),
        num_columns=weight.shape[0],
        depth=weight.shape[1],
        source_stride=weight.stride(0),
        source_dtype=ELEMENT_TYPES[weight.dtype],
        dtype=ELEMENT_TYPES[dtype],
        is_gated=is_gated,
        plan=plan.data_ptr(),
    )
    num_bytes = 0 if is_kept else library.function("compact_bytes", pointer, result=ctypes.c_int64)(arguments)
    is_compact = num_bytes > 0
    if not is_compact:
        sizes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int32)
        packed_bytes = library.function("packed_bytes", *sizes, result=ctypes.c_int64)
        num_bytes = packed_bytes(*weight.shape, ELEMENT_TYPES[dtype])
    packed = library.allocate(num_bytes)
    arguments.packed = packed.data_ptr()
    library.function("compact_pack" if is_compact else "gemm_pack", pointer)(arguments)
    return packed, is_compact
