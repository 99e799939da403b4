"""Memory that is replaced by huge pages has the same bytes at the same addresses, also while it is read."""

import mmap
import tempfile
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from kernels.memory import huge_pages
from kernels.memory.huge_pages import move_to_huge_pages

SIZE = 21 << 20  # one piece and a part of another


def mapped(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with tempfile.TemporaryFile() as file:
        file.write(data.tobytes())
        file.flush()
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def test_a_mapped_file_is_replaced_while_others_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "is_in_huge_pages", lambda _: True)  # this system may have none
    data = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    array, wrong, is_over = mapped(data), list[int](), threading.Event()
    address = array.ctypes.data

    def read() -> None:
        while not is_over.is_set():
            if not np.array_equal(array, data):
                wrong.append(1)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    move_to_huge_pages(weakref.ref(array))
    is_over.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert array.ctypes.data == address
    assert np.array_equal(array, data)
    with open("/proc/self/smaps") as maps:
        begin = (address + (2 << 20) - 1) // (2 << 20) * (2 << 20)
        (line,) = (line for line in maps if line.startswith(f"{begin:x}-"))
    assert line.split()[1:2] == ["r--p"]  # memory of its own, not the file's
    assert len(line.split()) == 5


@pytest.mark.parametrize("failing", ["mmap", "no huge pages"])
def test_without_memory_the_rest_stays(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(2).integers(0, 256, SIZE, np.uint8)
    array, replace, done = mapped(data), huge_pages._replace, list[int]()
    if failing == "mmap":
        monkeypatch.setattr(huge_pages, "_replace", lambda address, size: done.append(size))
    else:
        monkeypatch.setattr(huge_pages, "_replace", lambda *where: done.append(where[1]) or replace(*where))
        monkeypatch.setattr(huge_pages, "is_in_huge_pages", lambda _: False)
    move_to_huge_pages(weakref.ref(array))
    assert done == [16 << 20]
    assert np.array_equal(array, data)


def test_an_array_that_is_dropped_is_not_moved_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pieces nothing keeps it."""
    monkeypatch.setattr(huge_pages, "is_in_huge_pages", lambda _: True)
    arrays, found = [mapped(np.zeros(SIZE, np.uint8))], list[object]()
    array = weakref.ref(arrays[0])

    def drop() -> None:
        arrays.clear()
        found.append(array())

    move_to_huge_pages(array, drop)
    assert found == [None]
