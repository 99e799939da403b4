"""StoredMatrix: a weight matrix in its file's format, converted only when its numbers are needed."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from kernels.cpu.dequantize import cpu_dequantize, has_cpu_kernel
from kernels.cpu.library import CpuLibrary
from kernels.torch.dequantize import dequantize

#: Types of kernels.torch.dequantize that are dtypes of torch.
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PLAIN_NAMES = {dtype: name for name, dtype in _PLAIN.items()}


class StoredPart(NamedTuple):
    """Rows of a matrix, all stored as one type."""

    type_name: str  # of kernels.torch.dequantize
    data: torch.Tensor  # uint8 [rows, bytes of a row], contiguous, at a multiple of 4 bytes
    depth: int  # numbers in a row
    library: CpuLibrary | None = None  # the C kernels that dequantize; None = torch dequantizes
    release: Callable[[], None] | None = None  # lets the data's memory be reclaimed; it can be read again

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.data)


class StoredMatrix:
    """A matrix of parts of equal depth; the rows of each part follow those of the previous one.

    Parts may have different types: llama.cpp stores V of a layer with more bits than Q and K.
    """

    def __init__(self, parts: Sequence[StoredPart]) -> None:
        depths = {part.depth for part in parts}
        assert len(depths) == 1, depths
        self.parts = tuple(parts)
        self.shape = sum(part.rows for part in parts), parts[0].depth

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "StoredMatrix":
        """Wrap a dense matrix [rows, depth] float32, float16 or bfloat16 without a copy if it is contiguous."""
        tensor = tensor.contiguous()
        return cls([StoredPart(_PLAIN_NAMES[tensor.dtype], tensor.view(torch.uint8), tensor.shape[1])])

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers [rows, depth] in dtype.

        If no conversion is needed the result may be a view of the data. Otherwise the caller owns it, and the data is
        released.
        """
        first = self.parts[0]
        if len(self.parts) == 1 and _PLAIN.get(first.type_name) == dtype:
            return first.data.view(dtype)
        numbers = torch.empty(self.shape, dtype=dtype, device=first.data.device)
        begin = 0
        for part in self.parts:
            _write(part, numbers[begin : begin + part.rows])
            begin += part.rows
            if part.release is not None:
                part.release()
        return numbers


#: A tensor of a model file. Vectors are always dense; matrices may be stored in another form.
Weight: TypeAlias = torch.Tensor | StoredMatrix


def dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return a stored matrix's numbers in dtype; return a tensor unchanged."""
    return weight if isinstance(weight, torch.Tensor) else weight.dense(dtype)


def _write(part: StoredPart, out: torch.Tensor) -> None:
    """Write the part's numbers into out [rows, depth], contiguous, rounded once to its dtype."""
    name, data = part.type_name, part.data.view(-1)
    if name in _PLAIN:
        out.copy_(part.data.view(_PLAIN[name]))
    elif part.library is not None and has_cpu_kernel(name, out.dtype):
        cpu_dequantize(part.library, data, name, out.dtype, out)
    else:
        out.copy_(dequantize(data, name).view(out.shape))
