"""The dtype of a column's type, in each form in which NumPy and msgspec hand it over."""

from types import GenericAlias
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from ipc.tables.arrays import Bools, Doubles, Floats, Int32s, Ints, UInt64s, dtype_of

WHOLE: Any = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]  # NDArray[int32] before NumPy 2.5
ALIAS: Any = GenericAlias(list, np.int32)  # as NumPy 2.5's is: a generic alias whose only argument is the scalar


class Message(msgspec.Struct):
    """A message with a column."""

    column: Int32s


@pytest.mark.parametrize("kind", [WHOLE, ALIAS, Int32s, NDArray[np.int32]])
def test_every_form_of_a_columns_type(kind: Any) -> None:
    assert dtype_of(kind) == np.int32


def test_the_aliases() -> None:
    kinds = {Ints: "i8", UInt64s: "u8", Floats: "f4", Doubles: "f8", Bools: "?"}
    assert {kind: dtype_of(kind) for kind in kinds} == {kind: np.dtype(name) for kind, name in kinds.items()}


def test_the_form_that_msgspec_hands_to_a_hook() -> None:
    seen = []

    def hook(kind: Any, value: bytes) -> Any:
        seen.append(kind)
        return np.frombuffer(value, dtype_of(kind))

    message = msgspec.msgpack.decode(b"\x81\xa6column\xc4\4\1\0\0\0", type=Message, dec_hook=hook)
    assert message.column.tolist() == [1]
    assert len(get_args(seen[0])) == 2
