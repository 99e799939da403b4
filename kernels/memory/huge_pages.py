"""Requests to the system about a large array's memory: huge pages, and pages before they are written or replaced."""

import ctypes
import mmap
import weakref
from collections.abc import Callable

from kernels.arrays import UInt8s
from kernels.elements import Numbers
from kernels.rounding import round_up

_HUGE = 2 << 20  # bytes
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
_FAILED = ctypes.c_void_p(-1).value  # what mmap and mremap return then
_MAY_MOVE_FIXED = 3  # MREMAP_MAYMOVE | MREMAP_FIXED
_PIECE = 8 * _HUGE  # bytes moved at a time


def want_huge_pages(array: Numbers) -> None:
    """Request pages of 2 MiB from the system for the parts of the array that have not been touched yet.

    With pages of 4 KiB, a read or write at a random address waits for an address translation first. A system without
    huge pages ignores this.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and array.nbytes >= _HUGE:  # a smaller array has no whole huge page
        _advise(array.ctypes.data, array.nbytes, advice)


def take_pages(array: Numbers, begin: int, end: int) -> bool:
    """Make the system assign memory to these bytes of the array now. Return False if it cannot.

    Their content stays.
    """
    return _advise(array.ctypes.data + begin, end - begin, _POPULATE_WRITE)


def is_in_huge_pages(array: Numbers) -> bool:
    """Return whether at least half of an array's memory is in huge pages, according to the system."""
    address, is_here, huge_kb = array.ctypes.data, False, 0
    try:
        with open("/proc/self/smaps") as maps:
            for line in maps:
                name, *rest = line.split()
                if not name.endswith(":"):  # a mapping's first line: its addresses
                    begin, end = (int(place, 16) for place in name.split("-"))
                    is_here = begin < address + array.nbytes and address < end
                elif is_here and name in ("FilePmdMapped:", "AnonHugePages:", "ShmemPmdMapped:"):
                    huge_kb += int(rest[0])
    except OSError:
        return False
    return 2 * 1024 * huge_kb >= array.nbytes


def move_to_huge_pages(array: weakref.ref[UInt8s], before_the_rest: Callable[[], None] = lambda: None) -> None:
    """Replace the memory of bytes [n] that are only read by a copy in huge pages, piece by piece.

    array: the one that owns the memory; nothing is moved any more once it is gone, which each piece looks for. The
    addresses stay, and other threads may read the bytes: the system puts each piece in place of the old one in one call
    (mremap). The ends that fill no huge page stay as they are. If the first piece is not in huge pages after that, the
    system has none to spare, and the rest stays as it is. before_the_rest: called once it has shown some.
    """
    done = 0
    while num_bytes := _move_piece(array(), done):
        if not done:
            before_the_rest()
        done += num_bytes


def _move_piece(array: UInt8s | None, done: int) -> int:
    """Move the piece after the first `done` bytes in whole huge pages; return its bytes, 0 if the move is over.

    The array is there until this returns: without it, other data may be at its addresses.
    """
    if array is None:
        return 0
    begin = round_up(array.ctypes.data, _HUGE) + done
    size = min(_PIECE, (array.ctypes.data + array.nbytes) // _HUGE * _HUGE - begin)
    if size <= 0 or not _replace(begin, size):
        return 0
    at = begin - array.ctypes.data
    return size if done or is_in_huge_pages(array[at : at + size]) else 0


def _replace(address: int, size: int) -> bool:
    """Put a copy in huge pages in place of this memory, whole huge pages. Return whether that was possible."""
    libc, room = ctypes.CDLL(None), size + _HUGE
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    may, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    made = libc.mmap(None, ctypes.c_size_t(room), may, kind, -1, ctypes.c_size_t(0))
    if made == _FAILED:
        return False
    copy = round_up(made, _HUGE)
    _advise(copy, size, mmap.MADV_HUGEPAGE)
    ctypes.memmove(copy, address, size)
    begin, length, target = ctypes.c_void_p(copy), ctypes.c_size_t(size), ctypes.c_void_p(address)
    is_moved = not libc.mprotect(begin, length, mmap.PROT_READ) and (
        libc.mremap(begin, length, length, _MAY_MOVE_FIXED, target) == address
    )
    rest = [(made, copy - made), (copy + size, made + room - copy - size)] if is_moved else [(made, room)]
    for place, num_bytes in rest:
        if num_bytes:
            libc.munmap(ctypes.c_void_p(place), ctypes.c_size_t(num_bytes))
    return is_moved


def give_back_pages(array: Numbers) -> None:
    """Give the whole pages of a contiguous array back to the system, until they are written again. They hold zeros."""
    begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
    first, last = round_up(begin, mmap.PAGESIZE), end // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        _advise(first, last - first, mmap.MADV_DONTNEED)


def _advise(address: int, num_bytes: int, advice: int) -> bool:
    """Call madvise for all pages that contain one of these bytes. Return whether it succeeded."""
    page = mmap.PAGESIZE
    first, last = address // page * page, round_up(address + num_bytes, page)
    done = ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(advice))
    return bool(done == 0)
