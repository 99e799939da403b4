"""PackedWeights: a matrix in the C kernels' layout, as bytes that hold no addresses and can be kept in a file."""

import ctypes
import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kernels.arrays import UInt8s
from kernels.cpu.library import CpuLibrary
from kernels.elements import Dtype
from kernels.rounding import ceil_div

WHOLE, COMPACT, QUANTIZED, INT8 = range(4)  # enum in gemm.h
SUM_BYTES = 1 << 20  # enum in blocks/sums.h


class PackedWeights(NamedTuple):
    """A packed matrix [num_columns, depth] for products in dtype.

    Products of a quantized one use the bfloat16 numbers that its blocks represent. In products in 8 bits
    (kernels/cpu/c/products/int8.h) x, bfloat16 or float32, is quantized too.
    """

    packed: UInt8s
    num_columns: int
    depth: int
    dtype: Dtype
    packing: int  # WHOLE, COMPACT, QUANTIZED or INT8
    is_gated: bool = False  # whether it is packed for a product with a gate
    has_whole_panels: bool = False  # panels that products in 8 bits multiply in bfloat16


def digest_of(library: CpuLibrary, data: UInt8s) -> bytes:
    """Return a digest of contiguous bytes that tells whether a file of ours was damaged, at the speed of memory.

    It proves nothing about a file that another program wrote.
    """
    return digest_of_pieces(library, [data])


def digest_of_pieces(library: CpuLibrary, pieces: Iterable[UInt8s]) -> bytes:
    """Return digest_of() all pieces together. Each but the last one has a multiple of SUM_BYTES."""
    digest = hashlib.sha256()
    run = library.function("sum_pieces", ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    for piece in pieces:
        sums = np.zeros(ceil_div(piece.nbytes, SUM_BYTES), np.uint64)
        run(piece.ctypes.data, piece.nbytes, sums.ctypes.data)
        digest.update(sums.tobytes())
    return digest.digest()
