"""WeightMemory: what is kept for the next weights, and what is taken before they come."""

import itertools
import mmap
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.arrays import UInt8s
from kernels.elements import BFLOAT16
from kernels.memory import weight_memory
from kernels.memory.weight_memory import WeightMemory

MATRICES = [40 << 20, 64, 33 << 20, 4096]


@pytest.fixture(name="mapped")
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all mappings that are made from here on."""
    sizes, make = list[int](), mmap.mmap

    def counting(fd: int, num_bytes: int, **options: Any) -> mmap.mmap:
        sizes.append(num_bytes)
        return make(fd, num_bytes, **options)

    monkeypatch.setattr(weight_memory.mmap, "mmap", counting)
    return sizes


def places(blocks: list[UInt8s]) -> list[int]:
    return [block.ctypes.data for block in blocks]


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [[int(bound, 16) for bound in line.split()[0].split("-")] for line in lines]
    return any(begin <= address < end for begin, end in bounds)


def test_threads_that_pack_weights_get_memory_of_their_own() -> None:
    """As ranks in threads do, and an update of weights next to steps."""
    memory, before = WeightMemory(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            blocks = list(threads.map(lambda _: memory.allocate(64), range(20_000)))
    finally:
        sys.setswitchinterval(before)
    assert len({block.ctypes.data for block in blocks}) == len(blocks)


def test_little_is_left_over_of_the_mappings_that_arrays_share(mapped: list[int]) -> None:
    """Half of such a mapping's last huge page is left over, on average."""
    memory = WeightMemory()
    _ = [memory.allocate(18 << 20) for _ in range(84)], memory.allocate(33 << 20)
    assert sorted(mapped) == [33 << 20, *3 * [512 << 20]]


def test_kept_memory_is_that_of_the_next_data() -> None:
    """It is used again once the last array in it is gone, and released when it is no longer to be kept."""
    memory = WeightMemory()
    memory.keep(True)
    first = [memory.allocate(size) for size in MATRICES]
    second = [memory.allocate(size) for size in MATRICES]
    whole, view = places(first)[::2], first[2][100:200].view(np.uint16)
    assert len({*places(first), *places(second)}) == 8
    del first
    third = memory.allocate(MATRICES[0])
    assert places([third]) == whole[:1]
    fourth = memory.allocate(MATRICES[2])
    assert places([fourth]) != whole[1:], "a view is left"
    third.fill(7)
    del view
    assert places([memory.allocate(MATRICES[2] - 5)]) == whole[1:], "of the kept ones the smallest that is large enough"
    memory.keep(False)
    assert is_mapped(whole[0])
    del third
    assert not is_mapped(whole[0])


def test_memory_that_is_released_is_not_held_by_the_place_of_the_next_data() -> None:
    memory = WeightMemory()
    small = memory.allocate(64)
    address = small.ctypes.data
    del small
    memory.keep(False)
    assert not is_mapped(address)


def test_arrays_for_a_moment_have_a_mapping_of_their_own(mapped: list[int]) -> None:
    """They leave the memory of weights to weights, whichever is the larger."""
    memory = WeightMemory()
    memory.keep(True)
    _ = memory.allocate(40 << 20)  # gone at once, and kept
    begin = memory.brief((3, 5 << 20), BFLOAT16).ctypes.data
    assert memory.brief((5 << 20, 2), BFLOAT16).ctypes.data == begin
    assert memory.brief((1, 1), BFLOAT16).ctypes.data == begin
    assert mapped == [40 << 20, 30 << 20]
    larger = memory.brief((6, 5 << 20), BFLOAT16).ctypes.data
    assert memory.brief((3, 5 << 20), BFLOAT16).ctypes.data == larger, "the smaller one is of no use, and gone"


def test_updates_map_nothing_after_the_second_one(mapped: list[int]) -> None:
    """Weights that are packed together are in one mapping. Two of these take turns, if sizes differ a little too."""
    memory, present, begins = WeightMemory(), list[UInt8s](), list[int]()
    for more in (0, 64, 0, 4096, 64):
        memory.keep(True)
        with memory.together(sum(MATRICES)):
            new = [memory.allocate(size + more) for size in MATRICES]
        assert np.diff(places(new)).min() >= 64
        present, begins = new, [*begins, places(new)[0]]
        del new
    assert len(mapped) == 2
    assert begins[0] != begins[1]
    assert begins[2:] == [begins[0], begins[1], begins[0]]
    assert present[0].nbytes == MATRICES[0] + 64


def test_weights_stay_in_one_mapping_if_keeping_is_asked_for_again(mapped: list[int]) -> None:
    """An engine wakes up, say, while another thread packs."""
    memory = WeightMemory()
    memory.keep(True)
    with memory.together(sum(MATRICES)):
        first = memory.allocate(MATRICES[0])
        memory.keep(True)
        others = [memory.allocate(size) for size in MATRICES[1:]]
    assert len(mapped) == 1
    assert first.nbytes + sum(each.nbytes for each in others) == sum(MATRICES)


def test_more_than_was_expected_finds_memory(mapped: list[int]) -> None:
    memory = WeightMemory()
    memory.keep(True)
    with memory.together(1 << 20):
        blocks = [memory.allocate(1 << 20) for _ in range(4)]
    for number, block in enumerate(blocks):
        block.fill(number)
    assert [int(block.max()) for block in blocks] == [0, 1, 2, 3]
    assert mapped == [(1 << 20) + (1 << 16), 512 << 20]


@pytest.fixture(name="pieces")
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The places (begin, end) of all memory that is taken ahead. The tenth piece is not to be had."""
    places = list[tuple[int, int]]()

    def take(mapping: UInt8s, begin: int, end: int) -> bool:
        places.append((begin, end))
        return len(places) != 10

    monkeypatch.setattr(weight_memory, "take_pages", take)
    return places


def test_the_memory_of_the_next_weights_is_taken_piece_by_piece(
    mapped: list[int], pieces: list[tuple[int, int]]
) -> None:
    size = 9 << 20
    memory = WeightMemory()
    assert not memory.take_ahead(size), "nothing is kept"
    memory.keep(True)
    while memory.take_ahead(size):
        pass
    bounds = [*range(0, size, 2 << 20), size]
    assert pieces == list(itertools.pairwise(bounds))
    assert not memory.take_ahead(size), "it is there"
    with memory.together(size):
        block = memory.allocate(size)
        block.fill(7)
    assert len(mapped) == 1
    assert memory.take_ahead(size), "the next one's"
    memory.keep(False)
    assert not memory.take_ahead(size)


def test_memory_is_not_held_if_the_system_has_no_more(
    monkeypatch: pytest.MonkeyPatch, pieces: list[tuple[int, int]]
) -> None:
    """The system may take back what was taken. The next weights use that mapping, unless it is released."""
    size, advice, memory = 32 << 20, list[int](), WeightMemory()

    class Noted(mmap.mmap):
        def madvise(self, option: int, *place: int) -> None:
            advice.append(option)
            super().madvise(option, *place)

    monkeypatch.setattr(weight_memory.mmap, "mmap", Noted)
    memory.keep(True)
    while memory.take_ahead(size):
        assert advice == [mmap.MADV_HUGEPAGE]
    assert len(pieces) == 10
    assert advice == [mmap.MADV_HUGEPAGE, mmap.MADV_FREE]
    assert not memory.take_ahead(size), "it does not try again and again"
    with memory.together(size):
        block = memory.allocate(size)
        block.fill(7)
    assert (len(advice), int(block.min())) == (2, 7)


def test_weights_that_are_packed_keep_their_memory_if_the_system_has_no_more(
    mapped: list[int], pieces: list[tuple[int, int]]
) -> None:
    size, memory = 32 << 20, WeightMemory()
    memory.keep(True)
    with memory.together(size):
        while len(pieces) < 10:
            pass
        first, last = (memory.allocate(size // 2) for _ in range(2))
        first.fill(1)
        last.fill(2)
    assert last.ctypes.data - first.ctypes.data == size // 2
    assert (len(mapped), len(pieces), int(first.max()), int(last.min())) == (1, 10, 1, 2)


def test_memory_that_goes_while_it_is_released_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last array of a mapping goes in one thread, and the engine goes to sleep in another."""
    memory = WeightMemory()

    class Interrupted(mmap.mmap):
        def madvise(self, option: int, *place: int) -> None:
            if option == mmap.MADV_FREE:
                memory.keep(False)
            super().madvise(option, *place)

    monkeypatch.setattr(weight_memory.mmap, "mmap", Interrupted)
    memory.keep(True)
    block = memory.allocate(40 << 20)
    address = block.ctypes.data
    del block
    assert not is_mapped(address)


def test_memory_of_an_object_that_is_gone_is_the_systems() -> None:
    """Its last mapping too, whose rest is the object's own place for small arrays."""
    memory = WeightMemory()
    array, gone = memory.allocate(100), weakref.ref(memory)
    mapping = weakref.ref(array.base)
    del memory, array
    assert (gone(), mapping()) == (None, None)
