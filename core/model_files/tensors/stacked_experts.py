"""Weights of experts or heads that files store as one tensor for all of them: split into one for each."""

import re
from collections.abc import Iterator, Mapping
from functools import cache

import msgspec

from core.model_files.tensors.stored_tensor import StoredTensor
from core.models.config import ModelConfig

#: gpt-oss's names: what follows the name of a matrix -> the last part of our tensor's name.
_ENDINGS = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "exponents"}
_OF_ALL = re.compile(r"(.*\.experts\.)(gate_up|down)_proj")
_GGUF_HALVES = re.compile(r"(blk\.\d+\.)ffn_gate_up_exps\.weight")
_TURNED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")


def unstacked(found: Mapping[str, StoredTensor], *, by_head: bool = False) -> dict[str, StoredTensor]:
    """Return the tensors, with those of all experts split: x.weight [experts, rows, depth] -> x.0.weight, x.bias too.

    by_head: also split the norms of Q's and K's heads: q_norm.weight [heads, head_dim] -> q_norm.0.weight.
    """
    tensors: dict[str, StoredTensor] = {}
    for name, stored in found.items():
        stem, _, kind = name.rpartition(".")
        has_rows = kind == "bias" or (by_head and stem.endswith(("q_norm", "k_norm")))
        if len(stored.shape) != (2 if has_rows else 3):
            tensors[name] = stored
            continue
        tensors |= {f"{stem}.{number}.{kind}": each for number, each in enumerate(_each(stored))}
    return tensors


def unturned(found: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of gpt-oss's safetensors as matrices [out, in] of single experts, with our name endings.

    The file has gate_up_proj [experts, in, out], or gate_up_proj_blocks and _scales [experts, out, ...], and likewise
    down_proj. The outputs of gate and up alternate; the matrices have all rows of gate first.
    """
    tensors: dict[str, StoredTensor] = {}
    for name, stored in found.items():
        match = _TURNED.fullmatch(name)
        if match is None:
            tensors[name] = stored
            continue
        prefix, part, ending = match.groups()
        for number, each in enumerate(_each(stored)):
            if not ending and len(each.shape) == 2:
                each = msgspec.structs.replace(each, shape=each.shape[::-1], is_turned=True)
            if part == "gate_up_proj" and each.shape:
                each = msgspec.structs.replace(each, heads=1, order=_halves(each.shape[0]))
            tensors[f"{prefix}{number}.{part}.{_ENDINGS[ending]}"] = each
    return tensors


def with_turned_products(found: Mapping[str, StoredTensor], layers_name: str) -> dict[str, StoredTensor]:
    """Return the tensors of a file whose layers have their matrices as [in, out], as matrices [out, in]."""
    return {
        name: msgspec.structs.replace(stored, shape=stored.shape[::-1], is_turned=True)
        if name.startswith(f"{layers_name}.") and len(stored.shape) == 2
        else stored
        for name, stored in found.items()
    }


def by_expert(found: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors, with experts.gate_up_proj and experts.down_proj split into single experts' matrices.

    Files of some mixtures have these tensors in the form that transformers computes with, and names that end there:
    [experts, out, in], or [experts, in, out] (Qwen3-VL). Rows of gate come first; they stay one matrix with those of up
    if those of other MLPs are. Other shapes are left unchanged.
    """
    if config.experts is None:
        return dict(found)
    hidden, size = config.hidden_size, config.experts.intermediate_size
    shapes = {"gate_up": (2 * size, hidden), "down": (hidden, size)}
    tensors: dict[str, StoredTensor] = {}
    for name, stored in found.items():
        match = _OF_ALL.fullmatch(name)
        halves = ("gate_up",) if config.fused_gate_up else ("gate", "up")
        parts = ("down",) if match is None or match[2] == "down" else halves
        whole, depth = shapes["down" if match is None else match[2]]
        is_turned = match is not None and _is_turned(found, match[1], shapes)
        if match is None or stored.shape[1:] != ((depth, whole) if is_turned else (whole, depth)):
            tensors[name] = stored
            continue
        rows = whole // len(parts)
        for number, each in enumerate(_each(stored)):
            for place, part in enumerate(parts):
                own = f"{match[1]}{number}.{part}_proj.weight"
                tensors[own] = _rows_of(each, place * rows, (rows, depth), whole, is_turned=is_turned)
    return tensors


def by_halves(found: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a GGUF file, with those of gate and up of all experts cut: [experts, 2 * size, depth]."""
    tensors: dict[str, StoredTensor] = {}
    for name, stored in found.items():
        match = _GGUF_HALVES.fullmatch(name)
        if match is None or len(stored.shape) != 3 or stored.shape[1] % 2:
            tensors[name] = stored
            continue
        rows = stored.shape[1] // 2
        for number, each in enumerate(_each(stored)):
            for place, part in enumerate(("gate", "up")):
                own = f"{match[1]}ffn_{part}_exps.{number}.weight"
                tensors[own] = _rows_of(each, place * rows, (rows, each.shape[1]), 2 * rows, is_turned=False)
    return tensors


def _is_turned(found: Mapping[str, StoredTensor], stem: str, shapes: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether the matrices of a layer's experts have inputs as rows. At most one of the two is square."""
    each = ((found.get(f"{stem}{part}_proj"), shape) for part, shape in shapes.items())
    return any(stored is not None and stored.shape[1:] != shape for stored, shape in each)


def _rows_of(stored: StoredTensor, first: int, shape: tuple[int, int], whole: int, *, is_turned: bool) -> StoredTensor:
    """Return some of the `whole` rows of a matrix, starting at `first`."""
    if is_turned:
        return msgspec.structs.replace(stored, shape=shape, is_turned=True, first_row=first, num_rows=whole)
    row_bytes = (stored.end - stored.begin) // whole
    begin = stored.begin + first * row_bytes
    return msgspec.structs.replace(stored, shape=shape, begin=begin, end=begin + shape[0] * row_bytes)


def _each(stored: StoredTensor) -> Iterator[StoredTensor]:
    """Yield the tensor of each expert, one per index of the first dimension."""
    size = (stored.end - stored.begin) // max(stored.shape[0], 1)
    for number in range(stored.shape[0]):
        begin = stored.begin + number * size
        yield msgspec.structs.replace(stored, shape=stored.shape[1:], begin=begin, end=begin + size)


@cache
def _halves(count: int) -> tuple[int, ...]:
    """Return the order that puts even rows before odd rows."""
    return (*range(0, count, 2), *range(1, count, 2))
