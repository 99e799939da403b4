"""Plug-in executors: executors from other distributions, found by the name they are registered under.

A distribution registers a module in the entry-point group EXECUTORS (packaging.python.org, "Entry points
specification").
Only a plug-in that the config names is imported.
"""

import difflib
import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from core.execution.executor import EXECUTOR_API
from ipc.errors import ConfigError
from ipc.options.config_checks import BUILT_IN_EXECUTORS
from ipc.options.devices import EXECUTORS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def import_plug_in(name: str) -> ModuleType:
    """Import the module registered under this name. It has create(config), which returns an Executor.

    Errors: ConfigError if no distribution registers the name, or several do; if the module cannot be imported or lacks
    create; if this engine does not support its EXECUTOR_API.
    """
    found = _find(name)
    at = f"executor {name!r} ({found.value}, of {_distribution(found)})"
    try:
        module = importlib.import_module(found.value)
    except ImportError as error:
        raise ConfigError(f"{at} cannot be imported: {error}") from error
    version = getattr(module, "EXECUTOR_API", None)
    if not _is_served(version):
        major, minor = EXECUTOR_API
        ours = f"({major}, 0) to ({major}, {minor})" if minor else f"({major}, 0)"
        raise ConfigError(f"{at} is written for EXECUTOR_API {version!r}, but this engine supports {ours}")
    if not callable(getattr(module, "create", None)):
        raise ConfigError(f"{at} has no create(config)")
    return module


def _find(name: str) -> "EntryPoint":
    from importlib.metadata import entry_points  # takes 40 ms, and only plug-ins need it

    registered = entry_points(group=EXECUTORS)
    found = {entry.value: entry for entry in registered if entry.name == name}  # a path may list one of them twice
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        owners = " and ".join(sorted(f"{_distribution(entry)} ({entry.value})" for entry in found.values()))
        raise ConfigError(f"executor {name!r} is registered by {owners}: uninstall one of them")
    names = [*BUILT_IN_EXECUTORS, *sorted(registered.names)]
    near = difflib.get_close_matches(name, names, n=1)
    raise ConfigError(
        f"there is no executor {name!r}; available: {', '.join(names)}"
        + (f"; did you mean {near[0]}?" if near else f"; a plug-in registers its executor in the group {EXECUTORS}")
    )


def _distribution(entry: "EntryPoint") -> str:
    return "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def _is_served(version: object) -> bool:
    match version:
        case (int(major), int(minor)):
            return major == EXECUTOR_API[0] and minor <= EXECUTOR_API[1]
        case _:
            return False
