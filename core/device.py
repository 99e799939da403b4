"""What a model of ours runs on: the CPU with the C kernels where there are any, else torch's; or an NVIDIA GPU."""

import os

import torch

from core import log
from core.execution.executor import check_triton
from ipc.config import EngineConfig
from ipc.errors import ConfigError
from kernels.cpu.build import CpuLibraryError
from kernels.cpu.library import CpuLibrary, load_cpu_library


def num_threads(config: EngineConfig) -> int:
    """Compute threads: those asked for, else the CPUs this process may use."""
    return config.threads or len(os.sched_getaffinity(0))


def start_cpu_kernels(config: EngineConfig) -> CpuLibrary | None:
    """The C kernels with their threads running, and torch with one: its own would spin beside them. None: torch's.
    Errors: ConfigError when the config asks for C kernels and there are none."""
    if config.cpu_kernels == "torch":
        return None
    try:
        library = load_cpu_library()
    except CpuLibraryError as error:
        if config.cpu_kernels == "c":
            raise ConfigError(f"cpu_kernels=c is not to be had here: {error}; cpu_kernels=torch needs none") from error
        log.say(f"engine-core: slower, and numerics level L0, without C kernels: {error}")
        return None
    library.start_threads(num_threads(config))
    torch.set_num_threads(1)
    return library


def cuda_device() -> torch.device:
    """Errors: ConfigError."""
    check_triton()
    from kernels.triton.device import NoDeviceError, find_device

    try:
        return find_device()
    except NoDeviceError as error:
        raise ConfigError(f"device=cuda needs an NVIDIA GPU: {error}; device=cpu needs none") from error
