"""The device of device=cuda, or a ConfigError that says what was found in its place."""

import torch

from core.executor.interface import check_triton
from ipc.errors import ConfigError


def cuda_device() -> torch.device:
    """Errors: ConfigError."""
    check_triton()
    from kernels.triton.device import NoDeviceError, find_device

    try:
        return find_device()
    except NoDeviceError as error:
        raise ConfigError(f"device=cuda needs an NVIDIA GPU: {error}; device=cpu needs none") from error
