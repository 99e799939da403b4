"""How the executor that a config names is found: its module is imported when it is asked for, and torch with it."""

import importlib
from types import ModuleType

from core.execution.executor import Executor, check_triton
from ipc.config import EngineConfig


def import_executor(config: EngineConfig) -> ModuleType:
    """Import the module that makes the config's executor, and torch with it; only here. Errors: ConfigError."""
    on_gpu = config.executor == "local" and config.device == "cuda"
    if on_gpu:
        check_triton()
    return importlib.import_module(f"{__package__}.{'cuda' if on_gpu else config.executor}")


def load_executor(config: EngineConfig) -> Executor:
    """Make the executor named in the config."""
    executor: Executor = import_executor(config).create(config)
    return executor
