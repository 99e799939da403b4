"""The element types of arrays: float32, float16, and bfloat16, whose bits NumPy holds as uint16.

NumPy has no bfloat16. No array of the kernels or of a model's weights holds other numbers as uint16, so the dtype
determines what the bits mean. Arithmetic on such an array would be wrong: to_floats() converts it to float32.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kernels.arrays import Floats

Dtype: TypeAlias = np.dtype[Any]
#: Numbers with one of the element types.
Numbers: TypeAlias = NDArray[Any]

FLOAT32: Dtype = np.dtype(np.float32)
BFLOAT16: Dtype = np.dtype(np.uint16)
FLOAT16: Dtype = np.dtype(np.float16)

#: Element types by the names used in configurations.
ELEMENT_TYPES: dict[str, Dtype] = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}
_NAMES = {dtype: name for name, dtype in ELEMENT_TYPES.items()}

_BFLOAT16_NAN = np.uint16(0x7FC0)
#: Numbers converted at once. It bounds temporary memory, and keeps it in the CPU's caches.
_PIECE = 1 << 16


def element_name(dtype: Dtype) -> str:
    """Return the name of an element type: float32, bfloat16 or float16."""
    return _NAMES[dtype]


def to_floats(numbers: Numbers) -> Floats:
    """Return the numbers in float32, which holds all of them exactly; float32 itself is returned unchanged."""
    if numbers.dtype == BFLOAT16:
        wide: Floats = (numbers.astype(np.uint32) << 16).view(np.float32)
        return wide
    return numbers.astype(np.float32, copy=False)


def rounded(numbers: Numbers, dtype: Dtype) -> Numbers:
    """Return the numbers in dtype, each rounded once to the nearest, ties to even."""
    if numbers.dtype == dtype:
        return numbers
    result = np.empty(numbers.shape, dtype)
    write_rounded(numbers, result)
    return result


def write_rounded(numbers: Numbers, out: Numbers) -> None:
    """Write the numbers into out, contiguous and with the same shape, rounded to its dtype as in rounded()."""
    assert numbers.shape == out.shape, (numbers.shape, out.shape)
    source, target = np.ascontiguousarray(numbers).reshape(-1), out.reshape(-1)
    for begin in range(0, len(source), _PIECE):
        piece = slice(begin, begin + _PIECE)
        target[piece] = _rounded_piece(source[piece], out.dtype)


def _rounded_piece(numbers: Numbers, dtype: Dtype) -> Numbers:
    if numbers.dtype == dtype:
        return numbers
    floats = to_floats(numbers)
    if dtype != BFLOAT16:
        with np.errstate(over="ignore"):
            return floats.astype(dtype, copy=False)
    bits = floats.view(np.uint32)
    upper = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    upper[np.isnan(floats)] = _BFLOAT16_NAN
    return upper
