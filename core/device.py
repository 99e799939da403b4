"""The device for our own models: a CPU with the C kernels or with torch's operations, or an NVIDIA GPU.

torch is imported only by the functions that use it.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from core import log
from core.execution.executor import check_triton
from ipc.errors import ConfigError
from ipc.machine.cpus import usable_cpus
from ipc.options.config import EngineConfig
from kernels.cpu.build import CpuLibraryError, variant_of
from kernels.cpu.library import CpuLibrary, load_cpu_library

if TYPE_CHECKING:
    import torch


_INSTALL = "pip install torch, or engine-core with its extra [torch]"


def num_threads(config: EngineConfig) -> int:
    """Return the number of compute threads: as configured, else usable_cpus()."""
    return config.threads or usable_cpus()


def start_cpu_kernels(config: EngineConfig) -> CpuLibrary | None:
    """Start the C kernels' threads and return the kernels, or None if the model uses torch's operations.

    Errors: ConfigError if the config asks for kernels that are not available, or if torch is needed and not installed.
    """
    if config.cpu_kernels == "torch":
        return None
    try:
        library = load_cpu_library(variant_of(config.cpu_kernels))
    except CpuLibraryError as error:
        if config.cpu_kernels != "auto":
            raise ConfigError(
                f"cpu_kernels={config.cpu_kernels} is not available here: {error}; use cpu_kernels=torch"
            ) from error
        if find_spec("torch") is None:
            raise ConfigError(
                f"the C kernels are not available: {error}; install a C compiler, or torch, which works without them:  "
                f"{_INSTALL}"
            ) from error
        log.say(f"engine-core: without C kernels the engine is slower and has numerics level L0: {error}")
        return None
    if library.emulates_amx:
        log.say("engine-core: slow: this machine has no AMX, so the amx kernels emulate it with other instructions")
    library.start_threads(num_threads(config))
    return library


def start_torch(config: EngineConfig) -> None:
    """Set torch's number of threads. Errors: ConfigError if torch is not installed."""
    if find_spec("torch") is None:
        raise ConfigError(f"this needs torch, which is not installed: {_INSTALL}")
    import torch

    torch.set_num_threads(num_threads(config))


def cuda_device() -> "torch.device":
    """Return the GPU. Errors: ConfigError if Triton or a GPU is missing."""
    check_triton()
    from kernels.triton.device import NoDeviceError, find_device

    try:
        return find_device()
    except NoDeviceError as error:
        raise ConfigError(f"device=cuda needs an NVIDIA GPU: {error}; use device=cpu without one") from error
