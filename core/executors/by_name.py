"""How the executor that a config names is found: its module is imported when it is asked for, and torch with it."""

import importlib

from core.execution.executor import Executor
from ipc.config import EngineConfig


def executor_module(config: EngineConfig) -> str:
    """The name of the module that makes the config's executor."""
    name = "cuda" if config.executor == "local" and config.device == "cuda" else config.executor
    return f"core.executors.{name}"


def load_executor(config: EngineConfig) -> Executor:
    """The executor named in the config; its module (and torch with it) is imported only here."""
    module = importlib.import_module(executor_module(config))
    executor: Executor = module.create(config)
    return executor
