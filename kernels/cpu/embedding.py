"""CpuEmbedding: rows of an embedding table by the C kernel (kernels/cpu/embedding.h)."""

import ctypes

import torch

from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import ELEMENT_TYPES, CpuLibrary
from kernels.cpu.structs import EmbeddingArguments

NOT_PACKED, PACKED, COMPACT = range(3)  # enum in embedding.h


class CpuEmbedding:
    """Looks up rows of an embedding table and multiplies them by scale.

    The table is [V, d] float32 or bfloat16, contiguous, or the packed weights of a product."""

    def __init__(self, library: CpuLibrary, table: torch.Tensor | PackedMatrix, scale: float = 1.0) -> None:
        if isinstance(table, PackedMatrix):
            self.width, self.dtype, self.table = table.in_features, table.dtype, table.packed
            self.packing = COMPACT if table.is_compact else PACKED
        else:
            assert table.is_contiguous(), table.stride()
            self.width, self.dtype, self.table = table.shape[1], table.dtype, table
            self.packing = NOT_PACKED
        self.scale = scale
        self._run = library.function("embedding", ctypes.POINTER(EmbeddingArguments))

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the scaled rows [T, d] float32 of these ids [T] int64."""
        out = torch.empty((len(ids), self.width), dtype=torch.float32)
        self._run(
            EmbeddingArguments(
                ids.data_ptr(),
                self.table.data_ptr(),
                out.data_ptr(),
                *out.shape,
                ELEMENT_TYPES[self.dtype],
                self.scale,
                self.packing,
            )
        )
        return out
