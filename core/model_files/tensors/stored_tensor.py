"""StoredTensor and PackedTensor: where a weight is in a model's files, and in which form."""

from pathlib import Path

import msgspec

from core.models.config import Packing


class StoredTensor(msgspec.Struct, frozen=True):
    """The location and format of one tensor."""

    path: Path
    source_name: str  # the tensor's name in its file
    type: str
    shape: tuple[int, ...]
    begin: int  # in bytes from the start of the file
    end: int
    heads: int = 0  # leading heads whose rows are reordered
    order: tuple[int, ...] = ()  # for each row of a head: its position in the file
    is_turned: bool = False  # the file has the matrix transposed; `shape` and `order` describe the matrix
    first_row: int = 0  # for a transposed matrix: index of its first row ...
    num_rows: int = 0  # ... among this many in the file; 0 = the file has no others
    factors: tuple[tuple[int, float], ...] = ()  # see RowFactors.runs; of the matrix as it is returned


class PackedTensor(msgspec.Struct, frozen=True):
    """The tensors that a packed matrix is stored as (core/model_files/tensors/packed_layout.py)."""

    stem: str  # of the matrix's name
    parts: dict[str, StoredTensor]  # by kind
    shape: tuple[int, ...]
    packing: Packing
    heads: int = 0  # see StoredTensor
    order: tuple[int, ...] = ()
    input_scale: StoredTensor | None = None  # of activations in FP8; None: the file has none
