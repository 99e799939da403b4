"""fp8_matrix: a weight matrix as floats of 8 bits for a GPU's products. Import it only for device=cuda."""

import torch

from core.models.operations.stored_matrix import StoredMatrix, StoredPart
from kernels.dequantize import PLAIN_TYPES
from kernels.elements import FLOAT32
from kernels.torch.packed_rows import pack_blocks
from kernels.torch.tensors import to_tensor
from kernels.triton.fp8.fp8_product import BLOCK, Fp8Rows, quantized

_CHUNK = 1 << 24  # weights converted at a time; temporary tensors take some bytes per weight


def fp8_matrix(weight: StoredMatrix, device: torch.device) -> Fp8Rows | None:
    """Return the matrix as FP8 on the device; None: use its dense numbers, because not all of them are finite.

    What is FP8 in the file stays as it is, if 128 neighbours have one scale. All else is quantized, each 128 neighbours
    by themselves. The parts' data is released.
    """
    parts = []
    for part in weight.parts:
        if (rows := _stored(part, device) or _quantized(part, device)) is None:
            return None
        parts.append(rows)
    for part in weight.parts:
        part.let_go()
    return _joined(parts)


def input_scale(weight: StoredMatrix) -> float | None:
    """Return the scale that a file has for what the matrix multiplies; None: activations are quantized as they come.

    Of parts that have several it is the largest, so that no part's numbers are cut. Errors: ModelFileError if one is
    not a positive number.
    """
    scales = [part.input_scale() for part in weight.parts if part.input_scale is not None]
    return max(scales) if len(scales) == len(weight.parts) else None


def _stored(part: StoredPart, device: torch.device) -> Fp8Rows | None:
    """Return the codes and scales of a part that is stored as FP8, which has a scale for each 64; None for others."""
    if part.type_name != "FP8":
        return None
    packed = pack_blocks(part.data, part.type_name, device)
    assert packed is not None, part.type_name
    each = BLOCK // packed.group
    scales = _filled(packed.scales, each)
    firsts = scales[:, ::each].contiguous()
    if not torch.equal(firsts.repeat_interleave(each, 1)[:, : packed.scales.shape[1]], packed.scales):
        return None
    return Fp8Rows(_filled(packed.codes, BLOCK), firsts.T.contiguous(), part.depth)


def _quantized(part: StoredPart, device: torch.device) -> Fp8Rows | None:
    """Return the nearest codes to a part's numbers, with scales of their own."""
    dtype, parts = PLAIN_TYPES.get(part.type_name), []
    step = max(1, _CHUNK // part.depth)
    for begin in range(0, part.rows, step):
        piece = part._replace(data=part.data[begin : begin + step])
        numbers = StoredMatrix([piece]).dense(FLOAT32) if dtype is None else piece.data.view(dtype)
        tensor = to_tensor(numbers).to(device)
        if not bool(tensor.isfinite().all()):
            return None
        parts.append(quantized(tensor.contiguous()))
    return _joined(parts)


def _filled(numbers: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return [rows, n] with zeros up to a multiple, in its own memory."""
    missing = -numbers.shape[1] % multiple
    return torch.nn.functional.pad(numbers, (0, missing)) if missing else numbers.contiguous()


def _joined(parts: list[Fp8Rows]) -> Fp8Rows:
    if len(parts) == 1:
        return parts[0]
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts], 1)
    return Fp8Rows(codes, scales, parts[0].depth)
