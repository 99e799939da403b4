"""The products of a GPU's tensor cores on a CPU, bit for bit as published measurements describe them; see
tensor_core.c. They take the place of the interpreter's own: its sums depend on the size of a tile, and those of
bfloat16 are wrong."""

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter

from tests.interpreter.compiled import address, compiled
from tests.interpreter.programs import aligned, elementwise, made

_SOURCE = Path(__file__).with_name("tensor_core.c")


class Core(NamedTuple):
    """Neighbours of K that are added at a time, and the bits behind the point that are left of each and of the sum."""

    group: int
    fraction: int
    kept: int = 23


HOPPER, AMPERE = Core(16, 25), Core(8, 24)
#: Of floats of 8 bits. Hopper's is that of `wgmma`.
HOPPER_FP8, ADA_FP8, BLACKWELL_FP8 = Core(32, 13, 13), Core(16, 13, 13), Core(32, 25)
#: Of the C program, by the arrays' element types.
_KINDS = {np.dtype(np.float16): 0, np.dtype(np.uint16): 1, np.dtype(np.uint8): 2}


def product(
    a: npt.NDArray[Any], b: npt.NDArray[Any], sums: npt.NDArray[np.float32], core: Core | None = None
) -> npt.NDArray[np.float32]:
    """sums [M, N] and a [M, K] @ b [K, N]: float32, float16, uint16 for bfloat16, or uint8 for E4M3. core: None =
    Hopper's. Each may have a first axis of programs."""
    kind = _KINDS.get(a.dtype)
    if kind == 2:
        core = core or HOPPER_FP8
        a, b = a.astype(np.uint16), b.astype(np.uint16)
    a, b, sums = given = [np.ascontiguousarray(each) for each in (a, b, sums)]
    sizes = a.shape[-2], b.shape[-2], b.shape[-1]
    counts = {len(each) for each in given if each.ndim == 3}
    assert a.shape[-1] == sizes[1]
    assert sums.shape[-2:] == (sizes[0], sizes[2])
    assert len(counts) <= 1
    out = np.empty((*counts, sizes[0], sizes[2]), np.float32)
    pointers = [address(each) for each in (*given, out)]
    steps = [each[0].size if each.ndim == 3 else 0 for each in given]
    places = [*sizes, *(counts or {1}), *map(ctypes.c_size_t, steps)]
    if kind is None:
        assert a.dtype == np.float32, a.dtype
        compiled(_SOURCE).chains(*pointers, *places)
    else:
        compiled(_SOURCE).tensor_cores(*pointers, *places, kind, *(core or HOPPER))
    return out


def _dot(self: Any, a: Any, b: Any, sums: Any, precision: Any, imprecise: Any) -> Any:
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    arrays, varies = aligned(a, b, sums)
    return made(product(*arrays), sums.dtype.scalar, varies)


def multiply_add(
    a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], c: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """a * b + c, rounded once."""
    arrays = [np.ascontiguousarray(each, np.float32) for each in np.broadcast_arrays(a, b, c)]
    out = np.empty_like(arrays[0])
    compiled(_SOURCE).multiply_add(*map(address, (*arrays, out)), out.size)
    return out


def _multiply_add(self: Any, a: Any, b: Any, c: Any) -> Any:
    """The interpreter's is rounded twice."""
    assert a.data.dtype == np.float32, a.data.dtype
    return interpreter.TensorHandle(multiply_add(a.data, b.data, c.data), c.dtype.scalar)


_convert_float = interpreter._convert_float


def _converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Between float32 and bfloat16, rounded as a GPU does it, to the nearest; the interpreter cuts numbers off."""
    if source == tl.bfloat16 and target == tl.float32:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if source == tl.float32 and target == tl.bfloat16:
        bits = np.ascontiguousarray(data).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(data), np.uint32(0x7FFF), rounded).astype(np.uint16)
    return _convert_float(data, source, target, rounding)


def install() -> None:
    """Have the interpreter compute products and multiply-adds, and round, as a GPU. Forks share the C program."""
    compiled(_SOURCE)
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.create_fma = elementwise(_multiply_add)
    interpreter._convert_float = _converted
