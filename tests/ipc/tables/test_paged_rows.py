"""PagedRows: growable rows in pages, against plain lists."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.tables.paged_rows import PagedRows
from ipc.tables.rounding import ceil_div
from tests.columns import num_used_pages


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_extend_and_read_across_pages() -> None:
    rows = PagedRows(3, 4)
    rows.extend(1, 0, ints(*range(10)))
    rows.extend(2, 0, ints(*range(100, 103)))
    rows.extend(1, 10, ints(*range(10, 21)))
    assert rows.read(1, 0, 21).tolist() == list(range(21))
    assert rows.read(1, 3, 9).tolist() == [3, 4, 5, 6, 7, 8]
    assert rows.read(2, 0, 3).tolist() == [100, 101, 102]
    assert rows.read(1, 5, 5).tolist() == []
    assert rows.read(1, 0, 21).dtype == np.int32
    assert num_used_pages(rows) == 6 + 1


def test_columns_of_rows() -> None:
    rows = PagedRows(4, 4)
    which, positions = ints(3, 0, 2), ints(0, 7, 21)
    rows.ensure(which, positions + 1)
    rows.set(which, positions, ints(-5, 2**31 - 1, 9))
    assert rows.get(which, positions).tolist() == [-5, 2**31 - 1, 9]
    assert num_used_pages(rows) == 1 + 2 + 6


def test_ensure_keeps_what_is_there_and_takes_only_what_is_missing() -> None:
    rows = PagedRows(2, 4)
    rows.extend(0, 0, ints(1, 2, 3, 4))
    rows.ensure(ints(0, 1), ints(4, 0))
    assert num_used_pages(rows) == 1
    rows.ensure(ints(0, 1), ints(5, 1))
    rows.ensure(ints(0, 1), ints(1, 1))
    assert num_used_pages(rows) == 3
    assert rows.read(0, 0, 4).tolist() == [1, 2, 3, 4]


def test_a_cleared_row_gives_its_pages_to_others() -> None:
    rows = PagedRows(2, 4)
    rows.extend(0, 0, ints(*range(64)))
    assert num_used_pages(rows) == 16
    rows.clear(0)
    rows.clear(0)
    assert num_used_pages(rows) == 0
    rows.extend(1, 0, ints(*range(64, 128)))
    assert num_used_pages(rows) == 16
    assert rows.read(1, 0, 64).tolist() == list(range(64, 128))


def test_a_read_is_a_copy() -> None:
    rows = PagedRows(1, 4)
    rows.extend(0, 0, ints(1, 2, 3))
    rows.read(0, 0, 3)[:] = 9
    assert rows.read(0, 0, 3).tolist() == [1, 2, 3]


def test_fill_writes_each_row_whatever_its_length_and_wherever_the_pool_grows() -> None:
    """16 pages are there at first; rows 3 and 9 take several, and the pool grows before, among and after them."""
    lengths = {row: {3: 23, 9: 4 * 17}.get(row, 1 + row % 4) for row in range(40)}
    for first in (0, 3, 7, 15):
        rows, model = PagedRows(64, 4), dict[int, np.ndarray]()
        for some in (range(first), range(first, 40)):
            values = [ints(*range(1000 * row, 1000 * row + lengths[row])) for row in some]
            if len(some):
                rows.fill(ints(*some), values)
            model |= dict(zip(some, values, strict=True))
        assert all((rows.read(row, 0, lengths[row]) == values).all() for row, values in model.items())
        assert num_used_pages(rows) == sum(ceil_div(length, 4) for length in lengths.values())
        rows.clear_all(ints(*range(40)))
        assert num_used_pages(rows) == 0


def test_grow_rows() -> None:
    rows = PagedRows(1, 4)
    rows.extend(0, 0, ints(1, 2, 3, 4, 5))
    rows.grow_rows(5)
    rows.grow_rows(2)
    assert rows.num_rows == 5
    rows.extend(4, 0, ints(6))
    assert (rows.read(0, 0, 5).tolist(), rows.read(4, 0, 1).tolist()) == ([1, 2, 3, 4, 5], [6])


def test_page_size_is_a_power_of_two() -> None:
    for size in (0, 3, 12):
        with pytest.raises(AssertionError, match=f"page_size {size} is not a power of two"):
            PagedRows(1, size)


Operation = tuple[str, int, list[int]]
operations = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "append", "append", "clear", "grow"]),
        st.integers(0, 2**32 - 1),
        st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20),
    ),
    max_size=30,
)


@given(operations=operations, page_size=st.sampled_from([1, 2, 8]))
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
def test_agrees_with_lists(operations: list[Operation], page_size: int) -> None:
    rows, model = PagedRows(2, page_size), [[], []]  # type: tuple[PagedRows, list[list[int]]]
    for kind, pick, values in operations:
        row = pick % len(model)
        if kind == "extend":
            rows.extend(row, len(model[row]), np.array(values, np.int64))
            model[row] += values
        elif kind == "append":  # one value for each of several rows
            which = ints(*range(min(len(values), len(model))))
            lengths = ints(*(len(model[at]) for at in which.tolist()))
            rows.append(which, lengths, np.array(values[: len(which)], np.int64))
            for at, value in zip(which.tolist(), values, strict=False):
                model[at].append(value)
        elif kind == "clear":
            rows.clear(row)
            model[row] = []
        else:
            rows.grow_rows(len(model) + 1)
            model.append([])
        for at, expected in enumerate(model):
            assert rows.read(at, 0, len(expected)).tolist() == expected
        # append to an empty row, and an extend by nothing, take the pages they need and no more
        assert num_used_pages(rows) == sum(ceil_div(len(expected), page_size) for expected in model)
