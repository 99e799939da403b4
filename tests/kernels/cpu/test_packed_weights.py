"""Packed weights as bytes: they may be moved, and digest_of() finds damage."""

import ctypes
from typing import Any

import numpy as np
import pytest

from kernels.cpu.build import runnable_variants
from kernels.cpu.gemm import PackedMatrix, pack
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.cpu.packed_weights import COMPACT, digest_of
from kernels.elements import BFLOAT16, FLOAT32, rounded
from kernels.memory.aligned import aligned_empty


@pytest.fixture(scope="module", params=runnable_variants())
def library(request: pytest.FixtureRequest) -> CpuLibrary:
    return load_cpu_library(request.param)


def test_packed_weights_may_be_moved(library: CpuLibrary) -> None:
    """With pairs that compact weights store whole, which lie after the panels."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((70, 256), np.float32)
    numbers[rng.integers(0, 70, 3), rng.integers(0, 256, 3)] = 1e30
    x = rounded(rng.standard_normal((3, 256), np.float32), BFLOAT16)
    packed = pack(library, rounded(numbers, BFLOAT16))
    expected = PackedMatrix(library, packed, out_dtype=FLOAT32)(x)
    moved = aligned_empty(packed.packed.shape, packed.packed.dtype)
    moved[:] = packed.packed
    packed.packed.fill(0xFF)
    assert np.array_equal(PackedMatrix(library, packed._replace(packed=moved), out_dtype=FLOAT32)(x), expected)
    assert packed.packing == COMPACT or library.variant in ("portable", "amx")


def sums_by_definition(data: bytes) -> list[int]:
    """The sums of kernels/cpu/c/blocks/sums.h."""
    sums = []
    for begin in range(0, len(data), 1 << 20):
        piece = data[begin : begin + (1 << 20)]
        words = np.frombuffer(piece.ljust(-(-len(piece) // 64) * 64, b"\0"), "<u8").reshape(-1, 8)
        factor, lanes, total = np.uint64(0x9E3779B97F4A7C15), np.zeros(8, np.uint64), 0
        for line in words:
            lanes = lanes * factor + line
        for lane in lanes.tolist():
            total = (total * int(factor) + lane) % 2**64
        sums.append(total)
    return sums


@pytest.mark.parametrize("size", [1, 64, 1000, (1 << 20) - 1, (1 << 20) + 65])
def test_sums_are_those_of_the_definition(size: int, library: CpuLibrary) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    expected = sums_by_definition(data.tobytes())
    sums: Any = np.zeros(len(expected), np.uint64)
    library.function("sum_pieces", ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(
        data.ctypes.data, size, sums.ctypes.data
    )
    assert sums.tolist() == expected
    before = digest_of(library, data)
    data[size // 2] ^= 128
    assert digest_of(library, data) != before
