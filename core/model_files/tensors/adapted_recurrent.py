"""The linear layers of recurrent layers that adapters may change: which of the model's rows a file's layer has."""

import numpy as np

from core.adapters.file_matrix import FilePart
from core.model_files.tensors.recurrent_tensors import input_order
from core.models.config import ModelConfig, RecurrentParts
from ipc.tables.arrays import Ints

#: What the rows of each matrix are, in order: queries, keys, values, gates, betas and decays.
_PIECES = {
    "qkv_proj": "qkv",
    "z_proj": "z",
    "b_proj": "b",
    "a_proj": "a",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "qkvz_proj": "qkvz",
    "ba_proj": "ba",
}


def recurrent_file_parts(
    config: ModelConfig, file_inputs: tuple[str, ...], *, file_turns: bool
) -> dict[str, tuple[FilePart, ...]]:
    """Return the parts of a file's layers for one recurrent layer, by our name; see adapted_layers.py.

    file_inputs: the file's matrices of a gated delta net. file_turns: its heads of values take turns. A matrix of the
    model whose rows are in several layers of the file has no part.
    """
    own = config.recurrent
    assert own is not None, config
    if own.kind != "gated delta":
        names = [*(f"mixer.{name}" for name in own.inputs), "mixer.out_proj"]
        return {name: (FilePart(name),) for name in names}
    found: dict[str, tuple[FilePart, ...]] = {}
    for name in file_inputs:
        rows = _rows_of_file(name, config)
        parts = [
            FilePart(f"mixer.{ours}", np.concatenate([rows[piece][_heads(own, piece, file_turns)] for piece in pieces]))
            for ours in own.inputs
            if set(pieces := _PIECES[ours]) <= rows.keys()
        ]
        if parts:
            found[f"mixer.{name}"] = tuple(parts)
    columns = _heads(own, "v", file_turns)
    is_same = np.array_equal(columns, np.arange(len(columns)))
    return found | {"mixer.out_proj": (FilePart("mixer.out_proj", columns=None if is_same else columns),)}


def _rows_of_file(name: str, config: ModelConfig) -> dict[str, Ints]:
    """Return the rows of each piece in a file's matrix, in the order of the heads there."""
    own, pieces = config.recurrent, _PIECES[name]
    assert own is not None, config
    widths = [_width(own, piece) for piece in pieces]
    count, order = input_order(f".mixer.{name}.weight", config) or (0, ())
    rows = np.array(order if count else range(sum(widths)), np.int64)
    return dict(zip(pieces, np.split(rows, np.cumsum(widths)[:-1]), strict=True))


def _width(own: RecurrentParts, piece: str) -> int:
    if piece in "qk":
        return own.num_groups * own.key_dim
    return own.num_heads * (own.value_dim if piece in "vz" else 1)


def _heads(own: RecurrentParts, piece: str, file_turns: bool) -> Ints:
    """Return the place in the file of each number of a piece."""
    places = np.arange(_width(own, piece))
    if piece in "qk" or file_turns == own.takes_turns:
        return places
    groups = own.num_groups  # heads are [turns, groups], or [groups, turns]
    heads = places.reshape(own.num_heads // groups if file_turns else groups, -1, len(places) // own.num_heads)
    return heads.swapaxes(0, 1).reshape(-1)
