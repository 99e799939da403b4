"""StoredMatrix: a weight matrix in its file's format, converted only when its numbers are needed."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ipc.tables.arrays import UInt8s
from kernels.cpu.dequantize import cpu_dequantize, has_cpu_kernel
from kernels.cpu.library import CpuLibrary
from kernels.cpu.packed_weights import PackedWeights
from kernels.cpu.quantized import BlockRows, in_q8_0, quantize
from kernels.dequantize import PLAIN_TYPES, dequantize
from kernels.elements import Dtype, Numbers, write_rounded

_PLAIN_NAMES = {dtype: name for name, dtype in PLAIN_TYPES.items()}


class StoredPart(NamedTuple):
    """Rows of a matrix that are all stored as one type."""

    type_name: str  # as in kernels.dequantize
    data: UInt8s  # uint8 [rows, bytes per row], contiguous, at a multiple of 4 bytes
    depth: int  # numbers in a row
    library: CpuLibrary | None = None  # the C kernels for dequantizing; None = NumPy is used
    release: Callable[[], None] | None = None  # lets the data's memory be reclaimed; the data can be read again
    #: Reads the scale that the file has for the inputs of the matrix's products, in FP8. None: it has none.
    input_scale: Callable[[], float] | None = None

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(self.data)

    @property
    def block_rows(self) -> BlockRows:
        """Return the rows in the form that the kernels take."""
        return BlockRows(self.type_name, self.data)

    def let_go(self) -> None:
        """Let the data's memory be reclaimed, if the data can be read again."""
        if self.release is not None:
            self.release()


class StoredMatrix:
    """A matrix of parts of equal depth; the rows of each part follow those of the previous one.

    Parts may have different types: llama.cpp stores V of a layer with more bits than Q and K. They are read from the
    file when they are needed for the first time.
    """

    def __init__(self, parts: Sequence[StoredPart]) -> None:
        depths = {part.depth for part in parts}
        assert len(depths) == 1, depths
        self.shape = sum(part.rows for part in parts), parts[0].depth
        #: Names the matrix among those of a model's files: one of the same name has the same numbers. "": it has none.
        self.source = ""
        self._parts: tuple[StoredPart, ...] | None = tuple(parts)
        self._read: Callable[[], Sequence[StoredPart]] | None = None

    @classmethod
    def unread(cls, shape: tuple[int, int], read: Callable[[], Sequence[StoredPart]], source: str) -> "StoredMatrix":
        """Return a matrix whose parts `read` returns when they are needed."""
        matrix = cls.__new__(cls)
        matrix.shape, matrix.source, matrix._parts, matrix._read = shape, source, None, read
        return matrix

    @classmethod
    def joined(cls, matrices: "Sequence[StoredMatrix]") -> "StoredMatrix":
        """Return the rows of all matrices, one after the other."""
        if len(matrices) == 1:
            return matrices[0]
        (depth,) = {matrix.shape[1] for matrix in matrices}
        names = [matrix.source for matrix in matrices]
        source = f"({' '.join(names)})" if all(names) else ""
        shape = sum(matrix.shape[0] for matrix in matrices), depth
        return cls.unread(shape, lambda: [part for matrix in matrices for part in matrix.parts], source)

    @classmethod
    def of(cls, matrix: Numbers) -> "StoredMatrix":
        """Wrap a dense matrix [rows, depth] float32, float16 or bfloat16, without a copy if it is contiguous."""
        matrix = np.ascontiguousarray(matrix)
        return cls([StoredPart(_PLAIN_NAMES[matrix.dtype], matrix.view(np.uint8), matrix.shape[1])])

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        """Return the parts. The first call reads them."""
        if self._parts is None:
            assert self._read is not None
            self._parts, self._read = tuple(self._read()), None
            assert (sum(part.rows for part in self._parts), self._parts[0].depth) == self.shape, self.source
        return self._parts

    def rows(self, first: int, last: int) -> "StoredMatrix":
        """Return the rows from `first` to before `last`, as a view of the same data."""
        first, last = max(0, first), min(last, self.shape[0])
        source = f"{self.source}[{first}:{last}]" if self.source else ""
        return self.unread((last - first, self.shape[1]), lambda: self._slice(first, last), source)

    def _slice(self, first: int, last: int) -> list[StoredPart]:
        parts, begin = list[StoredPart](), 0
        for part in self.parts:
            rows = part.data[max(0, first - begin) : max(0, last - begin)]
            begin += part.rows
            if len(rows):
                parts.append(part._replace(data=rows))
        return parts

    def without(self, first: int, last: int) -> "StoredMatrix":
        """Return the rows before `first`, then those from `last` on, as a view of the same data."""
        ends = [self.rows(0, first)] if first else []
        return self.joined([*ends, self.rows(last, self.shape[0])])

    def dense(self, dtype: Dtype, make: Callable[[tuple[int, int], Dtype], Numbers] = np.empty) -> Numbers:
        """Return the numbers [rows, depth] in dtype.

        If no conversion is needed, the result may be a view of the data. Otherwise the caller owns it, and the data is
        released. make: returns the array that they are written to.
        """
        first = self.parts[0]
        if len(self.parts) == 1 and PLAIN_TYPES.get(first.type_name) == dtype:
            return first.data.view(dtype)
        numbers = make(self.shape, dtype)
        begin = 0
        for part in self.parts:
            _write(part, numbers[begin : begin + part.rows])
            begin += part.rows
            part.let_go()
        return numbers

    def quantized(
        self, library: CpuLibrary, *, is_gated: bool = False, in_8_bits: bool = False
    ) -> PackedWeights | None:
        """Return the matrix packed as stored, for products in bfloat16; None: use dense(). See quantize().

        in_8_bits: for products in 8 bits; then parts that are not quantized become Q8_0. The data is released.
        """
        rows = [part.block_rows for part in self.parts]
        if in_8_bits:
            rows = [block for part in rows if (block := in_q8_0(library, part)) is not None]
        packed = None
        if len(rows) == len(self.parts):
            packed = quantize(library, rows, is_gated=is_gated, in_8_bits=in_8_bits)
        for part in self.parts:
            part.let_go()
        return packed

    def own(self, dtype: Dtype) -> Numbers:
        """Return the numbers [rows, depth] in dtype, in separate memory."""
        numbers = self.dense(dtype)
        return numbers.copy() if np.shares_memory(numbers, self.parts[0].data) else numbers


#: A tensor of a model file. Vectors are always dense; matrices may be stored in another form.
Weight: TypeAlias = Numbers | StoredMatrix


def _write(part: StoredPart, out: Numbers) -> None:
    """Write the part's numbers into out [rows, depth], contiguous, rounded once to its dtype."""
    name, data = part.type_name, part.data.reshape(-1)
    if name in PLAIN_TYPES:
        write_rounded(part.data.view(PLAIN_TYPES[name]), out)
    elif part.library is not None and has_cpu_kernel(name, out.dtype):
        cpu_dequantize(part.library, data, name, out.dtype, out)
    else:
        write_rounded(dequantize(data, name).reshape(out.shape), out)
