"""The weights of experts, or of heads, that files have as one tensor for all of them: cut into one for each."""

import re
from collections.abc import Iterator, Mapping
from functools import cache

import msgspec

from core.model_files.stored_tensor import StoredTensor

#: gpt-oss's names: "", or what follows the name of a matrix -> the last part of our tensor's name.
_ENDINGS = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "exponents"}
_TURNED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")


def unstacked(found: Mapping[str, StoredTensor], *, by_head: bool = False) -> dict[str, StoredTensor]:
    """Return the tensors, with those of all experts cut: x.weight [experts, rows, depth] -> x.0.weight, x.bias too.

    by_head: the norms of Q's and K's heads are cut, too: q_norm.weight [heads, head_dim] -> q_norm.0.weight.
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
    """Return the tensors of gpt-oss's safetensors as matrices [out, in] of single experts, with names that end as ours.

    The file has gate_up_proj [experts, in, out], or gate_up_proj_blocks and _scales [experts, out, ...], and so
    down_proj. The outputs of gate and up take turns; the matrices have all rows of gate first.
    """
    tensors: dict[str, StoredTensor] = {}
    for name, stored in found.items():
        match = _TURNED.fullmatch(name)
        if match is None:
            tensors[f"{name}.weight" if name.endswith(".sinks") else name] = stored
            continue
        prefix, part, ending = match.groups()
        for number, each in enumerate(_each(stored)):
            if not ending and len(each.shape) == 2:
                each = msgspec.structs.replace(each, shape=each.shape[::-1], is_turned=True)
            if part == "gate_up_proj" and each.shape:
                each = msgspec.structs.replace(each, heads=1, order=_halves(each.shape[0]))
            tensors[f"{prefix}{number}.{part}.{_ENDINGS[ending]}"] = each
    return tensors


def _each(stored: StoredTensor) -> Iterator[StoredTensor]:
    """Yield the tensor of each expert, all of the first dimension's parts."""
    size = (stored.end - stored.begin) // max(stored.shape[0], 1)
    for number in range(stored.shape[0]):
        begin = stored.begin + number * size
        yield msgspec.structs.replace(stored, shape=stored.shape[1:], begin=begin, end=begin + size)


@cache
def _halves(count: int) -> tuple[int, ...]:
    """Return the order that puts the rows at even places before those at odd places."""
    return (*range(0, count, 2), *range(1, count, 2))
