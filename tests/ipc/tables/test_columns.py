"""Columns: a table of declared columns is allocated, filled, grown, cleared and checked."""

import numpy as np
import pytest

from core.batch.table import BatchTable
from ipc.tables.arrays import Bools, Doubles, Ints
from ipc.tables.columns import Columns, column


class Table(Columns):
    number: Ints = column(-1)
    time: Doubles = column()
    is_ready: Bools = column()
    length: Ints = column()


class Counts(Columns):
    first: Ints = column(7)
    second: Ints = column()


def test_a_table_has_an_array_for_each_declared_column() -> None:
    table = Table(3)
    assert table.number.tolist() == [-1, -1, -1]
    assert table.length.tolist() == [0, 0, 0]
    assert (table.time.dtype, table.is_ready.dtype) == (np.float64, np.bool_)
    assert table.number.base is table.length.base, "columns of one dtype lie in one block"
    assert "number" in vars(table), "reading a column is a plain attribute access"
    assert Table(5).num_column_rows == 5
    assert table.num_column_rows == 3


def test_growing_keeps_the_rows_and_adds_empty_ones() -> None:
    table = Table(2)
    table.number[:] = 4, 5
    table.time[1] = 2.5
    table.grow_columns(4)
    assert table.number.tolist() == [4, 5, -1, -1]
    assert table.time.tolist() == [0, 2.5, 0, 0]
    assert table.num_column_rows == 4
    table.number[3] = 9
    table.check_columns()


def test_clearing_gives_rows_their_empty_values() -> None:
    table = Table(3)
    table.number[:] = table.length[:] = 6
    table.is_ready[:] = True
    table.clear_columns([0, 2])
    assert table.number.tolist() == [-1, 6, -1]
    assert table.length.tolist() == [0, 6, 0]
    assert table.is_ready.tolist() == [False, True, False]


def test_rows_are_written_one_after_another() -> None:
    table = Counts(4)
    table.set_columns(np.array([3, 1]), [1, 2, 3, -(2**40)])
    assert table.first.tolist() == [7, 3, 7, 1]
    assert table.second.tolist() == [0, -(2**40), 0, 2]
    for wrong in ([1], [1, 2, 3], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match=r"cannot reshape array"):
            table.set_columns(np.array([0]), wrong)


def test_a_rebound_column_is_found() -> None:
    table = Table(3)
    table.check_columns()
    table.length = table.length + 1
    with pytest.raises(AssertionError, match="column length of Table was rebound"):
        table.check_columns()


def test_a_table_without_columns_is_a_mistake() -> None:
    class Nothing(Columns):
        number: Ints

    with pytest.raises(AssertionError, match="Nothing declares no column"):
        Nothing(1)


def test_the_batch_table_checks_its_columns() -> None:
    table = BatchTable(2)
    table.check_integrity(np.zeros(0, np.int64))
    table.num_tokens = table.num_tokens + 0
    with pytest.raises(AssertionError, match="column num_tokens of BatchTable was rebound"):
        table.check_integrity(np.zeros(0, np.int64))


def test_the_gap_behind_the_rows_has_nothing_of_what_the_memory_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint has it, too."""
    monkeypatch.setattr(np, "empty", lambda shape, dtype: np.full(shape, 77, dtype))

    class Table(Columns):
        number: Ints = column(-1)
        other: Ints = column(5)

    table = Table(3)
    whole = table.number
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    assert sorted(set(whole.ravel().tolist())) == [-1, 0, 5]
