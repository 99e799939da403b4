"""What a large tensor wants of the system's memory: huge pages, and pages before they are written."""

import ctypes
import mmap

import torch

from kernels.rounding import round_up

_HUGE = 2 << 20  # bytes
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14


def want_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the system for pages of 2 MiB where the tensor has not been touched yet: with pages of 4 KiB, what is read or
    written at random places waits for a translation first. Nothing happens where there are none."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and tensor.nbytes >= _HUGE:  # else there is no such page in it
        _advise(tensor.data_ptr(), tensor.nbytes, advice)


def take_pages(tensor: torch.Tensor, begin: int, end: int) -> bool:
    """Have the system find memory for these bytes of the tensor now, whose content stays; False where it cannot."""
    return _advise(tensor.data_ptr() + begin, end - begin, _POPULATE_WRITE)


def _advise(address: int, num_bytes: int, advice: int) -> bool:
    """Of all pages that have one of these bytes."""
    page = mmap.PAGESIZE
    first, last = address // page * page, round_up(address + num_bytes, page)
    done = ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(advice))
    return bool(done == 0)
