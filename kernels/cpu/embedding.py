"""CpuEmbedding: rows of an embedding table by the C kernel (kernels/cpu/c/layers/embedding.h)."""

import ctypes

import numpy as np

from kernels.arrays import Floats, Ints
from kernels.cpu.dequantize import type_number
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import ELEMENT_NUMBERS, CpuLibrary
from kernels.cpu.quantized import BlockRows
from kernels.cpu.structs import EmbeddingArguments
from kernels.elements import BFLOAT16, FLOAT32, Numbers
from kernels.memory.aligned import aligned_empty

NOT_PACKED, PACKED = range(2)  # enum in embedding.h; tables packed for a product are PACKED + their packing
_BLOCKS = 16  # in the same enum: rows of blocks are _BLOCKS + their type


class CpuEmbedding:
    """Looks up rows of an embedding table and multiplies them by scale.

    The table is [V, d] float32 or bfloat16, contiguous; or the packed weights of a product; or rows of quantized
    blocks, which represent bfloat16 numbers.

    places [positions, d] float32: rows added by position. kinds [k, d] float32: rows added by kind of token, for a
    table that is not packed; ids of kind k are offset by k * V.
    """

    def __init__(
        self,
        library: CpuLibrary,
        table: Numbers | PackedMatrix | BlockRows,
        scale: float = 1.0,
        *,
        kinds: Floats | None = None,
        places: Floats | None = None,
    ) -> None:
        if isinstance(table, PackedMatrix):
            self.width, self.dtype, self.table = table.in_features, table.dtype, table.packed
            self.packing = PACKED + table.packing
        elif isinstance(table, BlockRows):
            self.width, self.dtype, self.table = table.depth, BFLOAT16, np.ascontiguousarray(table.data)
            self.packing = _BLOCKS + type_number(library, table.type_name)
        else:
            assert table.flags.c_contiguous, table.strides
            self.width, self.dtype, self.table = table.shape[1], table.dtype, table
            self.packing = NOT_PACKED
        assert kinds is None or self.packing == NOT_PACKED, self.packing
        self.scale, self.kinds, self.places, self.num_words = scale, kinds, places, len(self.table)
        self._run = library.function("embedding", ctypes.POINTER(EmbeddingArguments))

    @property
    def constants(self) -> EmbeddingArguments:
        """The C struct without ids and output; it points into this object."""
        return EmbeddingArguments(
            table=self.table.ctypes.data,
            width=self.width,
            dtype=ELEMENT_NUMBERS[self.dtype],
            scale=self.scale,
            packing=self.packing,
            kinds=address(self.kinds),
            places=address(self.places),
            num_words=self.num_words,
        )

    def __call__(self, ids: Ints, positions: Ints | None = None) -> Floats:
        """Return the scaled rows [T, d] float32 for these ids [T] int64, plus the rows for kinds and positions [T]."""
        assert self.places is None or positions is not None, "rows are added by position"
        out, arguments = aligned_empty((len(ids), self.width), FLOAT32), self.constants
        arguments.ids, arguments.out, arguments.num_rows = ids.ctypes.data, out.ctypes.data, len(ids)
        arguments.positions = address(positions)
        self._run(arguments)
        return out


def address(array: Numbers | Ints | None) -> int | None:
    """Return the address of an array's first number, or None without an array."""
    return None if array is None else int(array.ctypes.data)
