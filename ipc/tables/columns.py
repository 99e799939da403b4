"""Columns: a table's NumPy columns, each declared once with its name, its dtype and the value of an empty row."""

import struct
from functools import lru_cache
from typing import Any, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from ipc.tables.arrays import Rows, dtype_of

# Unused entries after each column. Tables grow by doubling, and columns a power of two of bytes apart would share a few
# sets of the cache: at 4,096 rows a step of the scheduler that reads several columns took 5 % longer.
_COLUMN_GAP = 8
#: Attributes derived from the columns and their blocks.
_OWN = ("_blocks", "_names", "_empty", "_bound")


class _Column(msgspec.Struct, frozen=True):
    """Declaration of a column."""

    empty: float


def column(empty: float = 0) -> Any:
    """Declare a column whose unused rows hold `empty`; the annotation gives the dtype."""
    return _Column(empty)


class Columns:
    """Base class of tables: `number: Ints = column(-1)` in a subclass declares a column [rows] int64.

    Each instance has an array [rows] under the name of each column, so reading one is a plain attribute access. The
    columns of one dtype are the rows of one block [columns, rows], in the order of their declaration.
    """

    def __init__(self, num_rows: int) -> None:
        self._declare()
        self._blocks: dict[np.dtype[Any], NDArray[Any]] = {
            dtype: np.zeros((len(names), 0), dtype) for dtype, names in self._names.items()
        }
        self.grow_columns(num_rows)

    def _declare(self) -> None:
        """Set what depends on the class's columns alone."""
        self._names: dict[np.dtype[Any], list[str]] = {}
        self._empty: dict[np.dtype[Any], NDArray[Any]] = {}  # [columns, 1]
        self._bound: dict[str, NDArray[Any]] = {}
        for dtype, declared in _declared(type(self)).items():  # type: ignore[arg-type]
            self._names[dtype] = list(declared)
            self._empty[dtype] = np.array([[each.empty] for each in declared.values()], dtype)

    @property
    def num_column_rows(self) -> int:
        """Return the number of rows of the columns."""
        num_rows: int = next(iter(self._blocks.values())).shape[1]
        return num_rows

    def grow_columns(self, num_rows: int) -> None:
        """Add empty rows up to num_rows. Columns become new arrays; existing rows keep their values."""
        for dtype, block in self._blocks.items():
            # Zeros, because a checkpoint includes the gap: it must not contain old memory.
            wide = np.zeros((len(block), num_rows + _COLUMN_GAP), dtype)[:, :num_rows]
            wide[:, : block.shape[1]] = block
            wide[:, block.shape[1] :] = self._empty[dtype]
            self._blocks[dtype] = wide
        self._bind()

    def _bind(self) -> None:
        """Set each column's attribute to its row of a block."""
        for dtype, block in self._blocks.items():
            for name, values in zip(self._names[dtype], block, strict=True):
                setattr(self, name, values)
                self._bound[name] = values

    def parts(self) -> dict[str, Any]:
        """Return the blocks as a list, and the other attributes, for a snapshot (core/capture/snapshot.py)."""
        others = {name: part for name, part in self.__dict__.items() if name not in self._bound and name not in _OWN}
        return {**others, "_blocks": list(self._blocks.values())}

    def set_parts(self, parts: dict[str, Any]) -> None:
        """Become the table with these parts. Errors: ValueError for blocks that do not fit its columns."""
        declared, blocks = _declared(type(self)), parts["_blocks"]  # type: ignore[arg-type]
        found = [(block.dtype, len(block)) for block in blocks]
        if found != [(dtype, len(columns)) for dtype, columns in declared.items()]:
            raise ValueError(f"{type(self).__name__} with the blocks {found}")
        if len({block.shape[1] for block in blocks}) != 1:
            raise ValueError(f"{type(self).__name__} with columns of several lengths")
        self.__dict__.update(parts)
        self._declare()
        self._blocks = dict(zip(declared, blocks, strict=True))
        self._bind()

    def clear_columns(self, rows: Rows | list[int] | slice) -> None:
        """Set these rows to the empty value in every column."""
        for dtype, block in self._blocks.items():
            block[:, rows] = self._empty[dtype]

    def set_columns(self, rows: Rows, entries: list[int]) -> None:
        """Write whole rows in one assignment, for a table of int64 columns only.

        entries: [rows * columns], row after row, with an entry for every column in the order of their declaration.
        Errors: ValueError if there are too many or too few.
        """
        (block,) = self._blocks.values()
        packed = struct.pack(f"={len(entries)}q", *entries)
        block[:, rows] = np.frombuffer(packed, np.int64).reshape(len(rows), len(block)).T

    def check_columns(self) -> None:
        """Check that every column is still its original array. An AssertionError names a column that was rebound."""
        now = self.__dict__
        for name, values in self._bound.items():
            assert now[name] is values, f"column {name} of {type(self).__name__} was rebound: {now[name]!r:.80}"


@lru_cache(maxsize=32)  # reading the annotations takes 0.1 ms
def _declared(table: type[Columns]) -> dict[np.dtype[Any], dict[str, _Column]]:
    """Return the columns of a class by dtype and name, in the order of their declaration."""
    declared: dict[np.dtype[Any], dict[str, _Column]] = {}
    for name, hint in get_type_hints(table).items():
        if isinstance(default := getattr(table, name, None), _Column):
            declared.setdefault(dtype_of(hint), {})[name] = default
    assert declared, f"{table.__name__} declares no column"
    return declared


def unpack_numbers(column: bytes) -> list[int]:
    """Return the request numbers of a uint32 column; an incomplete last entry is left out."""
    return [int.from_bytes(column[at : at + 4], "little") for at in range(0, len(column) - 3, 4)]


def unpack_choices(column: bytes) -> list[int]:
    """Return the choices of a uint16 column; an incomplete last entry is left out."""
    return [int.from_bytes(column[at : at + 2], "little") for at in range(0, len(column) - 1, 2)]
