"""PackedMatrix: a weight matrix in the C kernel's layout, multiplied with any number of rows (c/products/gemm.h)."""

import ctypes

import numpy as np

from kernels.arrays import Floats, UInt8s
from kernels.cpu.library import ELEMENT_NUMBERS, CpuLibrary
from kernels.cpu.packed_weights import COMPACT, INT8, QUANTIZED, WHOLE, PackedWeights
from kernels.cpu.structs import GemmArguments, PackArguments, SecondFormArguments
from kernels.elements import Dtype, Numbers
from kernels.memory.aligned import aligned_empty
from kernels.memory.weight_memory import Room

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


class SecondForm:
    """The weights of a quantized matrix in a form for products of more than a few rows, which may come later.

    Until they come, products of any number of rows use the quantized ones, with the same bits.
    """

    def __init__(self, weights: PackedWeights | None = None) -> None:
        self.arguments = SecondFormArguments()
        if weights is not None:
            self.use(weights)

    def use(self, weights: PackedWeights) -> None:
        """Compute with these weights from now on. No product is being computed."""
        assert weights.packing in (WHOLE, COMPACT), weights
        self._packed = weights.packed  # kept alive
        self.arguments.packing, self.arguments.weights = weights.packing, weights.packed.ctypes.data


class PackedMatrix:
    """A packed weight matrix that computes y = x @ weight.T + bias.

    `weight` [out, in] is float32, bfloat16 or float16. It is packed as `dtype`, and the original is not kept. Or it is
    packed already. A quantized matrix gives the same bits as a product with its dequantized numbers in bfloat16;
    products in 8 bits have the same bits in all variants.

    An element of y is one float32 sum in a fixed order, plus the bias [out] float32, rounded once to out_dtype. Its
    bits do not depend on the number of rows, the row's place among them, or the number of threads.

    bfloat16 weights take 12 bits each, without loss, if the instruction set can unpack them fast (`packing` is COMPACT;
    see kernels/cpu/c/products/compact.h). is_kept: see pack().

    second: the same weights as quantized ones in another form, for products of more than a few rows: these take less
    time, and have the same bits.

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
        second: SecondForm | None = None,
    ) -> None:
        assert activation is None or (gate is None and activation in ACTIVATIONS), activation
        assert (constants is not None) == (activation == "xielu"), activation
        if not isinstance(weight, PackedWeights):
            weight = pack(library, weight, dtype, is_gated=gate is not None, is_kept=is_kept)
        in_8_bits = weight.packing == INT8
        assert dtype in (None, weight.dtype) or (in_8_bits and not weight.has_whole_panels), dtype
        assert weight.is_gated == (gate is not None), gate
        assert second is None or weight.packing == QUANTIZED, weight.packing
        num_columns, self.in_features = weight.num_columns, weight.depth
        self.out_features = num_columns if gate is None else num_columns // 2
        self.dtype = dtype or weight.dtype
        self.out_dtype = out_dtype or self.dtype
        self.variant = f"c-{library.variant}"  # identifies the arithmetic, which determines the bits of a product
        self.variant += f"-int8.{INT8_ARITHMETIC}" if in_8_bits else ""
        self.bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
        self._constants = None if constants is None else np.ascontiguousarray(constants, np.float32)
        self.packed, self.packing = weight.packed, weight.packing
        self.second = second
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
            second=None if second is None else ctypes.addressof(second.arguments),
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
    columns, depth = weight.shape
    arguments = PackArguments(
        source=weight.ctypes.data,
        num_columns=columns,
        depth=depth,
        source_stride=weight.strides[0] // weight.itemsize,
        source_dtype=ELEMENT_NUMBERS[weight.dtype],
        dtype=ELEMENT_NUMBERS[dtype],
        is_gated=is_gated,
    )
    packed, packing = _packed(library, arguments, is_kept)
    return PackedWeights(packed, columns, depth, dtype, packing, is_gated)


def pack_second(
    library: CpuLibrary, first: PackedWeights, *, is_kept: bool = False, room: Room | None = None
) -> PackedWeights:
    """Pack a quantized matrix as pack() would pack its dequantized numbers, but for signs of zeros.

    is_kept: see pack(). room: the memory to use, if it has enough.
    """
    assert first.packing == QUANTIZED, first.packing
    arguments = PackArguments(
        source=first.packed.ctypes.data,
        num_columns=first.num_columns,
        depth=first.depth,
        dtype=ELEMENT_NUMBERS[first.dtype],
        is_gated=first.is_gated,
        is_packed=True,
    )
    packed, packing = _packed(library, arguments, is_kept, room)
    return PackedWeights(packed, first.num_columns, first.depth, first.dtype, packing, first.is_gated)


def _packed(
    library: CpuLibrary, arguments: PackArguments, is_kept: bool, room: Room | None = None
) -> tuple[UInt8s, int]:
    """Return packed weights, and how they are packed."""
    columns, depth, pointer = arguments.num_columns, arguments.depth, ctypes.POINTER(PackArguments)
    plan_bytes = library.function("compact_plan_bytes", ctypes.c_int64, result=ctypes.c_int64)
    plan = np.empty(plan_bytes(columns), np.uint8)
    arguments.plan = plan.ctypes.data
    num_bytes = 0 if is_kept else library.function("compact_bytes", pointer, result=ctypes.c_int64)(arguments)
    is_compact = num_bytes > 0
    if not is_compact:
        packed_bytes = library.function(
            "packed_bytes", ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, result=ctypes.c_int64
        )
        num_bytes = packed_bytes(columns, depth, arguments.dtype)
    packed = library.memory.allocate(num_bytes, room)
    arguments.packed = packed.ctypes.data
    library.function("compact_pack" if is_compact else "gemm_pack", pointer)(arguments)
    return packed, COMPACT if is_compact else WHOLE
