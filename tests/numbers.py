"""Numbers of the element types, for tests: random weights as a model takes them, NaN, and what they are as tensors."""

from typing import Any

import numpy as np
import torch

from core.models.operations.stored_matrix import StoredMatrix, Weight
from kernels.elements import FLOAT32, Dtype, Numbers, rounded
from kernels.torch.tensors import to_tensor


def dense(weight: Weight, dtype: Dtype) -> Numbers:
    """A stored matrix's numbers in dtype; a vector as it is."""
    return weight.dense(dtype) if isinstance(weight, StoredMatrix) else weight


def dense_tensor(weight: Weight, dtype: Dtype = FLOAT32) -> torch.Tensor:
    """The same as a tensor."""
    return to_tensor(dense(weight, dtype))


def nan(dtype: Dtype) -> Any:
    """NaN in this element type, to be assigned to parts of an array."""
    return rounded(np.array([np.nan], np.float32), dtype)[0]


def fill_with_nan(cache: Any) -> None:
    """Write NaN into all blocks of a KV cache in the machine's memory, but for the null block."""
    for layer in cache.memory:
        layer[1:].view(np.uint8)[...] = 0xFF  # NaN in each element type, and as a quantized cache's scale
