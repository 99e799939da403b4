"""CpuEmbedding: rows of an embedding table by the C kernel (kernels/cpu/embedding.h)."""

import ctypes

import torch

from kernels.cpu_library import ELEMENT_TYPES, CpuLibrary


class EmbeddingArguments(ctypes.Structure):
    """struct Embedding."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "table", "out")),
        *((name, ctypes.c_int64) for name in ("num_rows", "width")),
        ("dtype", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class CpuEmbedding:
    """table [V, d] float32 or bfloat16, contiguous; its rows are multiplied by scale."""

    def __init__(self, library: CpuLibrary, table: torch.Tensor, scale: float = 1.0) -> None:
        assert table.is_contiguous(), table.stride()
        self.table, self.scale = table, scale
        self._run = library.function("embedding", ctypes.POINTER(EmbeddingArguments))

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int64 -> [T, d] float32."""
        out = torch.empty((len(ids), self.table.shape[1]), dtype=torch.float32)
        dtype = ELEMENT_TYPES[self.table.dtype]
        self._run(
            EmbeddingArguments(ids.data_ptr(), self.table.data_ptr(), out.data_ptr(), *out.shape, dtype, self.scale)
        )
        return out
