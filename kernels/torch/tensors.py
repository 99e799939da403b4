"""Converts arrays to torch tensors, and tensors to arrays, without copying."""

from typing import Any

import torch

from kernels.elements import BFLOAT16, FLOAT16, FLOAT32, Dtype, Numbers

#: torch's dtypes by the arrays' element types.
DTYPES: dict[Dtype, torch.dtype] = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
_ELEMENT_TYPES = {theirs: ours for ours, theirs in DTYPES.items()}


def to_tensor(numbers: Numbers) -> torch.Tensor:
    """Return a tensor that shares the array's memory. uint16 means bfloat16 (kernels/elements.py)."""
    tensor = torch.from_numpy(numbers)
    return tensor.view(torch.bfloat16) if numbers.dtype == BFLOAT16 else tensor


def to_array(tensor: torch.Tensor) -> Numbers:
    """Return an array that shares the memory of a tensor on the CPU. bfloat16 becomes uint16 (kernels/elements.py)."""
    array: Any = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array  # type: ignore[no-any-return]


def element_type(dtype: torch.dtype) -> Dtype:
    """Return the arrays' element type for this torch dtype."""
    return _ELEMENT_TYPES[dtype]
