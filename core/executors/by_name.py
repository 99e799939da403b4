"""The import of the executor that a config names. torch is imported with it, and not before."""

import importlib
from types import ModuleType

from core.execution.executor import Executor, check_triton
from ipc.config import EngineConfig


def import_executor(config: EngineConfig) -> ModuleType:
    """Import the module of the config's executor, which imports torch. Errors: ConfigError if triton is missing."""
    on_gpu = config.executor == "local" and config.device == "cuda"
    if on_gpu:
        check_triton()
    name: str = "cuda" if on_gpu else config.executor
    if config.executor == "fake" and (config.fake_poison or config.fake_step_us):
        name = "poisoned" if config.fake_poison else "paced"
    return importlib.import_module(f"{__package__}.{name}")


def load_executor(config: EngineConfig) -> Executor:
    """Create the executor that the config names."""
    executor: Executor = import_executor(config).create(config)
    return executor
