"""The device of our own models: the CPU, with the C kernels or else torch's operations, or an NVIDIA GPU."""

import os

import torch

from core import log
from core.execution.executor import check_triton
from ipc.config import EngineConfig
from ipc.errors import ConfigError
from kernels.cpu.build import CpuLibraryError
from kernels.cpu.library import CpuLibrary, load_cpu_library


def num_threads(config: EngineConfig) -> int:
    """Return the number of compute threads: as configured, else the CPUs that this process may use."""
    return config.threads or len(os.sched_getaffinity(0))


def start_cpu_kernels(config: EngineConfig) -> CpuLibrary | None:
    """Start the C kernels' threads and return the kernels; None: the model uses torch's operations.

    With C kernels, torch gets one thread: more of them would spin beside the kernels' threads. Errors: ConfigError
    when the config asks for C kernels and there are none.
    """
    if config.cpu_kernels == "torch":
        return None
    try:
        library = load_cpu_library()
    except CpuLibraryError as error:
        if config.cpu_kernels == "c":
            raise ConfigError(f"cpu_kernels=c is not available here: {error}; cpu_kernels=torch needs none") from error
        log.say(f"engine-core: slower, and numerics level L0, without C kernels: {error}")
        return None
    library.start_threads(num_threads(config))
    torch.set_num_threads(1)
    return library


def cuda_device() -> torch.device:
    """Return the GPU. Errors: ConfigError when there is no Triton or no GPU."""
    check_triton()
    from kernels.triton.device import NoDeviceError, find_device

    try:
        return find_device()
    except NoDeviceError as error:
        raise ConfigError(f"device=cuda needs an NVIDIA GPU: {error}; device=cpu needs none") from error
