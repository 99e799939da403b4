"""CStruct: a C struct as a ctypes class, and its fields' types."""

import ctypes
from collections.abc import Iterator
from typing import ClassVar

POINTER, INT32, INT64, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def fields(names: str, ctype: type) -> Iterator[tuple[str, type]]:
    """Return fields of one type with these space-separated names, in order."""
    return ((name, ctype) for name in names.split())


class CStruct(ctypes.Structure):
    """A struct that Python fills for the C kernels."""

    c_name: ClassVar[str]  # its name in kernels/cpu/c/
