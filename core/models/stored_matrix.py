"""StoredMatrix: a weight matrix as its file stores it, converted only when its numbers are asked for."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from kernels.cpu.dequantize import cpu_dequantize, has_cpu_kernel
from kernels.cpu.library import CpuLibrary
from kernels.torch.dequantize import dequantize

#: Types of kernels.torch.dequantize that are numbers of torch's.
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PLAIN_NAMES = {dtype: name for name, dtype in _PLAIN.items()}


class StoredPart(NamedTuple):
    """Rows of one type."""

    type_name: str  # of kernels.torch.dequantize
    data: torch.Tensor  # uint8 [rows, bytes of a row], contiguous, at a multiple of 4 bytes
    depth: int  # numbers in a row
    library: CpuLibrary | None = None  # of the C kernels, which dequantize; None = torch does
    release: Callable[[], None] | None = None  # the data need not stay in memory, but can be read again

    @property
    def rows(self) -> int:
        return len(self.data)


class StoredMatrix:
    """Parts of one depth, the rows of one below those of the other. Each may be of another type: llama.cpp stores the V
    of a layer finer than its Q and K."""

    def __init__(self, parts: Sequence[StoredPart]) -> None:
        depths = {part.depth for part in parts}
        assert len(depths) == 1, depths
        self.parts = tuple(parts)
        self.shape = sum(part.rows for part in parts), parts[0].depth

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "StoredMatrix":
        """Take a dense matrix [rows, depth] float32, float16 or bfloat16, which is not copied."""
        tensor = tensor.contiguous()
        return cls([StoredPart(_PLAIN_NAMES[tensor.dtype], tensor.view(torch.uint8), tensor.shape[1])])

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers [rows, depth] in dtype. Where nothing has to be converted they may be a view of the data,
        else they are the caller's, and the data is released."""
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


#: A tensor of a model file: vectors are dense always, matrices may be stored in another form.
Weight: TypeAlias = torch.Tensor | StoredMatrix


def dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return a stored matrix's numbers in dtype, and a tensor as it is."""
    return weight if isinstance(weight, torch.Tensor) else weight.dense(dtype)


def _write(part: StoredPart, out: torch.Tensor) -> None:
    """out [rows, depth], contiguous: the part's numbers, rounded once to its dtype."""
    name, data = part.type_name, part.data.view(-1)
    if name in _PLAIN:
        out.copy_(part.data.view(_PLAIN[name]))
    elif part.library is not None and has_cpu_kernel(name, out.dtype):
        cpu_dequantize(part.library, data, name, out.dtype, out)
    else:
        out.copy_(dequantize(data, name).view(out.shape))
