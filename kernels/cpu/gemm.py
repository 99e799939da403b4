"""PackedMatrix: a weight matrix in the C kernel's layout, multiplied with any number of rows (c/products/gemm.h)."""

import ctypes

import numpy as np

from kernels.arrays import Floats
from kernels.cpu.library import ELEMENT_NUMBERS, CpuLibrary
from kernels.cpu.packed_weights import COMPACT, INT8, QUANTIZED, WHOLE, PackedWeights
from kernels.cpu.structs import GemmArguments, PackArguments
from kernels.elements import Dtype, Numbers
from kernels.memory.aligned import aligned_empty

#: Version of the arithmetic of products in 8 bits; part of the fingerprint.
INT8_ARITHMETIC = 2
#: Activations by their names in transformers; enum in gate.h.
GATES = {
    "silu": 1,
    "gelu_pytorch_tanh": 2,
    "gelu": 3,
    "clamped_silu": 4,
    "relu2": 5,
    "quick_gelu": 6,
    "xielu": 7,
}
#: Activations that a product without a gate may have.
ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "relu2", "quick_gelu", "xielu")


_BLOCK, _BLOCK_BYTES = 32, 48  # numbers and bytes of an Int8Block (int8.h)


def blocks_in_8_bits(depth: int) -> int:
    """Return the number of blocks in a row of x with `depth` numbers, a multiple of 32."""
    return depth // _BLOCK


def row_bytes_in_8_bits(depth: int) -> int:
    """Return the number of bytes of these blocks."""
    return blocks_in_8_bits(depth) * _BLOCK_BYTES


class PackedMatrix:
    """A packed weight matrix that computes y = x @ weight.T + bias.

    `weight` [out, in] is float32, bfloat16 or float16. It is packed as `dtype`, and the original is not kept. Or it is
    packed already. A quantized matrix gives the same bits as a product with its dequantized numbers in bfloat16;
    products in 8 bits have the same bits in all variants.

    An element of y is one float32 sum in a fixed order, plus the bias [out] float32, rounded once to out_dtype. Its
    bits do not depend on the number of rows, the row's place among them, or the number of threads.

    bfloat16 weights take 12 bits each, without loss, if the instruction set can unpack them fast (`packing` is COMPACT;
    see kernels/cpu/c/products/compact.h). is_kept: see pack().

    stored: the same weights, quantized, for products of few rows: these take less time, and have the same bits.

    With `gate`, weight is [2 * out, in] and bias [2 * out]: the gates, then the values they scale (up). y = f(gate) *
    up; gate and up are rounded to out_dtype first. With `activation`, one of ACTIVATIONS, y = f(x @ weight.T + bias).
    """

    def __init__(
        self,
        library: CpuLibrary,
        weight: Numbers | PackedWeights,
        bias: Floats | None = None,
        *,
        dtype: Dtype | None = None,  # float32 or bfloat16; None = the weight's dtype
        out_dtype: Dtype | None = None,  # float32 or bfloat16; None = dtype
        gate: str | None = None,  # a name in GATES
        activation: str | None = None,
        constants: Floats | None = None,  # of an activation that has any
        is_kept: bool = False,
        stored: PackedWeights | None = None,
    ) -> None:
        assert activation is None or (gate is None and activation in ACTIVATIONS), activation
        assert (constants is not None) == (activation == "xielu"), activation
        if not isinstance(weight, PackedWeights):
            weight = pack(library, weight, dtype, is_gated=gate is not None, is_kept=is_kept)
        in_8_bits = weight.packing == INT8
        assert dtype in (None, weight.dtype) or (in_8_bits and not weight.has_whole_panels), dtype
        assert weight.is_gated == (gate is not None), gate
        assert stored is None or (stored.packing == QUANTIZED and weight.packing in (WHOLE, COMPACT)), stored
        assert stored is None or stored[1:4] == weight[1:4], stored
        num_columns, self.in_features = weight.num_columns, weight.depth
        self.out_features = num_columns if gate is None else num_columns // 2
        self.dtype = dtype or weight.dtype
        self.out_dtype = out_dtype or self.dtype
        self.variant = f"c-{library.variant}"  # identifies the arithmetic, which determines the bits of a product
        self.variant += f"-int8.{INT8_ARITHMETIC}" if in_8_bits else ""
        self.bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
        self._constants = None if constants is None else np.ascontiguousarray(constants, np.float32)
        self.packed, self.packing = weight.packed, weight.packing
        self._stored = None if stored is None else stored.packed
        self._gemm = library.function("gemm", ctypes.POINTER(GemmArguments))
        #: The C struct. Not set yet: x, y, their rows and strides, and the next product.
        self.arguments = GemmArguments(
            weights=self.packed.ctypes.data,
            bias=None if self.bias is None else self.bias.ctypes.data,
            num_columns=num_columns,
            depth=self.in_features,
            dtype=ELEMENT_NUMBERS[self.dtype],
            y_dtype=ELEMENT_NUMBERS[self.out_dtype],
            gate=0 if gate is None else GATES[gate],
            packing=self.packing,
            activation=0 if activation is None else GATES[activation],
            constants=None if self._constants is None else self._constants.ctypes.data,
            stored=None if self._stored is None else self._stored.ctypes.data,
        )

    def __call__(self, x: Numbers) -> Numbers:
        """Return the product [T, out] with out_dtype. x is [T, in] with dtype, and each of its rows is contiguous."""
        assert x.dtype == self.dtype, (x.dtype, self.dtype)
        assert x.shape[1] == self.in_features, (x.shape, self.in_features)
        assert x.strides[1] == x.itemsize or x.shape[1] == 1 or not len(x), x.strides
        y = aligned_empty((x.shape[0], self.out_features), self.out_dtype)
        arguments = self.arguments
        arguments.x, arguments.y = x.ctypes.data, y.ctypes.data
        arguments.num_rows, arguments.y_stride = y.shape
        arguments.x_stride = x.strides[0] // x.itemsize
        if self.packing == INT8:
            blocks = aligned_empty((x.shape[0], row_bytes_in_8_bits(self.in_features)), np.dtype(np.uint8))
            arguments.quantized, arguments.quantized_stride = blocks.ctypes.data, blocks_in_8_bits(self.in_features)
        self._gemm(arguments)
        return y


def pack(
    library: CpuLibrary, weight: Numbers, dtype: Dtype | None = None, *, is_gated: bool = False, is_kept: bool = False
) -> PackedWeights:
    """Pack a weight [out, in] with any strides, for products in dtype; None = the weight's.

    is_kept: the CPU's caches keep the weights from one product to the next; then compact weights gain nothing.
    """
    dtype = dtype or weight.dtype
    if weight.strides[1] != weight.itemsize:
        weight = np.ascontiguousarray(weight)
    pointer = ctypes.POINTER(PackArguments)
    plan_bytes = library.function("compact_plan_bytes", ctypes.c_int64, result=ctypes.c_int64)
    plan = np.empty(plan_bytes(weight.shape[0]), np.uint8)
    arguments = PackArguments(
        source=weight.ctypes.data,
        num_columns=weight.shape[0],
        depth=weight.shape[1],
        source_stride=weight.strides[0] // weight.itemsize,
        source_dtype=ELEMENT_NUMBERS[weight.dtype],
        dtype=ELEMENT_NUMBERS[dtype],
        is_gated=is_gated,
        plan=plan.ctypes.data,
    )
    num_bytes = 0 if is_kept else library.function("compact_bytes", pointer, result=ctypes.c_int64)(arguments)
    is_compact = num_bytes > 0
    if not is_compact:
        packed_bytes = library.function(
            "packed_bytes", ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, result=ctypes.c_int64
        )
        num_bytes = packed_bytes(*weight.shape, ELEMENT_NUMBERS[dtype])
    packed = library.memory.allocate(num_bytes)
    arguments.packed = packed.ctypes.data
    library.function("compact_pack" if is_compact else "gemm_pack", pointer)(arguments)
    columns, depth = weight.shape
    return PackedWeights(packed, columns, depth, dtype, COMPACT if is_compact else WHOLE, is_gated)
