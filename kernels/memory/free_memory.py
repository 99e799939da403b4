"""Free memory that the C library keeps for later goes back to the system."""

import contextlib
import ctypes


def return_free_memory() -> None:
    """Give what the C library keeps back to the system, after work that has needed much for a moment."""
    with contextlib.suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)
