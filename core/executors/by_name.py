"""Imports the executor that the config names: one of this package, or a plug-in. Only this import loads torch."""

import importlib
from types import ModuleType

from core.execution.executor import Executor, check_triton
from core.executors.fake_options import read_fake_options
from core.executors.plug_ins import import_plug_in
from ipc.options.config import EngineConfig
from ipc.options.config_checks import BUILT_IN_EXECUTORS
from ipc.options.workers import has_workers


def import_executor(config: EngineConfig) -> ModuleType:
    """Import the module of the config's executor, which may import torch.

    Errors: ConfigError if triton or the named plug-in is missing, or if options of the fake executor are invalid.
    """
    if has_workers(config):
        return importlib.import_module(f"{__package__.removesuffix('executors')}workers.executor")
    if config.executor not in BUILT_IN_EXECUTORS:
        return import_plug_in(config.executor)
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
