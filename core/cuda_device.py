"""The device of device=cuda, or a ConfigError that says what was found in its place."""

import importlib.util

import torch

from ipc.errors import ConfigError


def cuda_device() -> torch.device:
    """Errors: ConfigError."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("device=cuda needs triton, which is not installed: pip install 'llm-engine-core[cuda]'")
    from kernels.triton.device import NoDeviceError, find_device

    try:
        return find_device()
    except NoDeviceError as error:
        raise ConfigError(f"device=cuda needs an NVIDIA GPU: {error}; device=cpu needs none") from error
