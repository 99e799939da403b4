"""want_huge_pages: fewer address translations for a large tensor that is read and written all over."""

import ctypes
import mmap

import torch

_HUGE = 2 << 20  # bytes


def want_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the system for pages of 2 MiB where the tensor has not been touched yet: with pages of 4 KiB, what is read or
    written at random places waits for a translation first. Nothing happens where there are none."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or tensor.nbytes < _HUGE:  # there is no such page in it
        return
    page = mmap.PAGESIZE
    first, last = tensor.data_ptr() // page * page, -(-(tensor.data_ptr() + tensor.nbytes) // page) * page
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(advice))
