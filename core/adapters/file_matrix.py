"""FileMatrix: a linear layer as in an adapter's files, and the model's matrices that are made of its rows.

Files may have one layer for Q, K and V, or for gate and up, and may have a head's numbers in another order than the
kernels.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ipc.errors import ModelFileError
from ipc.tables.arrays import Floats, Ints
from kernels.low_rank import LowRank


class FilePart(NamedTuple):
    """One of the model's matrices."""

    name: str  # of the model (model.layers.0.self_attn.q_proj)
    # the row in the file for each of its rows; None = it is the whole layer, in the same order
    rows: Ints | None = None
    # the column of the layer in the file for each of its columns; None = in the same order
    columns: Ints | None = None
    factors: Floats | None = None  # of each of the model's rows; None = 1


class FileMatrix(NamedTuple):
    """A linear layer in a file."""

    parts: tuple[FilePart, ...]
    num_rows: int = 0  # if its parts have `rows`


def model_matrices(source: Path, pairs: Mapping[str, LowRank], known: Mapping[str, FileMatrix]) -> dict[str, LowRank]:
    """Return what an adapter adds to each of the model's matrices. pairs: A and B by the layer's name in the file.

    The parts of a layer share A. known: the layers that adapters may change. Errors: ModelFileError.
    """
    found: dict[str, LowRank] = {}
    for name, pair in pairs.items():
        if (layer := known.get(name)) is None:
            raise ModelFileError(
                f"{source}: it changes {name!r:.120}, but the model has no such matrix that adapters may change"
            )
        for part in layer.parts:
            if part.name in found:
                raise ModelFileError(f"{source}: it changes {part.name} under two names; {name!r:.120} is one of them")
            if part.columns is not None:
                if pair.a.shape[1] != len(part.columns):
                    raise ModelFileError(
                        f"{source}: {name}: lora_A is {list(pair.a.shape)}; the model's layer has {len(part.columns)} "
                        "columns"
                    )
                pair = pair._replace(a=np.ascontiguousarray(pair.a[:, part.columns]))
            num_rows = layer.num_rows if part.factors is None or part.rows is not None else len(part.factors)
            if num_rows and len(pair.b) != num_rows:
                raise ModelFileError(
                    f"{source}: {name}: lora_B is {list(pair.b.shape)}; the model's layer has {num_rows} rows"
                )
            b = pair.b if part.rows is None else np.ascontiguousarray(pair.b[part.rows])
            found[part.name] = pair._replace(b=b if part.factors is None else b * part.factors[:, None])
    return found
