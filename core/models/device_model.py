"""device_model: a model of our own on a GPU; imported for device=cuda only, since it needs torch and triton."""

from collections.abc import Iterable

import torch

from core.models.config import ModelConfig
from core.models.llama import Llama
from core.models.stored_matrix import Weight
from core.models.triton_operations import TritonOperations
from ipc.errors import OutOfMemoryError
from kernels.elements import Dtype


def device_model(
    config: ModelConfig, weights: Iterable[tuple[str, Weight]], dtype: Dtype, device: torch.device
) -> Llama:
    """Build the model on the device. Errors: ModelFileError naming missing tensors; OutOfMemoryError."""
    try:
        return Llama(config, weights, dtype, operations=TritonOperations(config, dtype, device))
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"the model's weights do not fit the GPU: {error}") from error
