"""pack: a weight matrix as a GPU's products read it when it stays quantized; imported for device=cuda only."""

from collections.abc import Callable, Iterable

import torch

from core.models.operations.stored_matrix import StoredMatrix, StoredPart
from core.models.operations.weight_form import WeightForm
from kernels.dequantize import PLAIN_TYPES
from kernels.torch.packed_rows import PackedRows, join, pack_blocks, quantize_rows
from kernels.torch.tensors import to_tensor

#: Packs a part, or returns None if it has no packed form.
_Packer = Callable[[StoredPart, torch.device], PackedRows | None]


def pack(weight: StoredMatrix, form: WeightForm, device: torch.device) -> list[PackedRows] | None:
    """Return the matrix's parts packed on the device, those of one kind joined; None: use its dense numbers.

    STORED packs matrices that are quantized as a whole, INT8 others too. The parts' data is released.
    """
    packer = _PACKERS.get(form)
    if packer is None:
        return None
    parts = []
    for part in weight.parts:
        if (packed := packer(part, device)) is None:
            return None
        parts.append(packed)
    for part in weight.parts:
        part.let_go()
    return _joined(parts)


def _joined(parts: Iterable[PackedRows]) -> list[PackedRows]:
    groups: list[list[PackedRows]] = []
    for part in parts:
        if groups and groups[-1][0].joins(part):
            groups[-1].append(part)
        else:
            groups.append([part])
    return [join(group) for group in groups]


def _as_stored(part: StoredPart, device: torch.device) -> PackedRows | None:
    return None if part.type_name in PLAIN_TYPES else pack_blocks(part.data, part.type_name, device)


def _in_8_bits(part: StoredPart, device: torch.device) -> PackedRows | None:
    """Return a quantized part as it is stored, another one as Q8_0."""
    dtype = PLAIN_TYPES.get(part.type_name)
    if dtype is None:
        return _as_stored(part, device)
    return quantize_rows(to_tensor(part.data.view(dtype)).to(device))


_PACKERS: dict[WeightForm, _Packer] = {WeightForm.STORED: _as_stored, WeightForm.INT8: _in_8_bits}
