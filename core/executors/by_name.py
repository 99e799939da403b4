"""Imports the executor that the config names: one of this package, or a plug-in. Only this import loads torch."""

import importlib
from types import ModuleType

from core.execution.executor import EXECUTOR_API, Executor, check_triton
from core.executors.fake_options import read_fake_options
from core.plug_ins import PlugInKind
from ipc.options.config import EngineConfig
from ipc.options.config_checks import BUILT_IN_EXECUTORS
from ipc.options.devices import EXECUTORS
from ipc.options.workers import has_workers

_PLUG_INS = PlugInKind("executor", EXECUTORS, BUILT_IN_EXECUTORS, EXECUTOR_API)


def import_executor(config: EngineConfig) -> ModuleType:
    """Import the module of the config's executor, which may import torch.

    Errors: ConfigError if triton or the named plug-in is missing, or if options of the fake executor are invalid.
    """
    if has_workers(config):
        return importlib.import_module(f"{__package__.removesuffix('executors')}workers.executor")
    if config.executor not in BUILT_IN_EXECUTORS:
        return _PLUG_INS.import_module(config.executor)
    on_gpu = config.executor == "local" and config.device == "cuda"
    if on_gpu:
        check_triton()
    name: str = "cuda" if on_gpu else config.executor
    if config.executor == "fake":
        options = read_fake_options(config)
        name = "poisoned" if options.poison else "paced" if options.step_us else name
    return importlib.import_module(f"{__package__}.{name}")


def load_executor(config: EngineConfig) -> Executor:
    """Create the executor that the config names."""
    executor: Executor = import_executor(config).create(config)
    return executor
