"""Plug-ins: executors, and other parts, from other distributions, found by the name they are registered under.

A distribution registers a module in the kind's entry-point group (packaging.python.org, "Entry points specification").
Only a plug-in that the config names is imported.
"""

import difflib
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from core.execution.executor import EXECUTOR_API
from ipc.errors import ConfigError
from ipc.options.config_checks import BUILT_IN_EXECUTORS
from ipc.options.devices import EXECUTORS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class PlugInKind(NamedTuple):
    """A part of the engine that may come from another distribution."""

    noun: str  # in errors
    group: str  # of entry points
    version_name: str  # of the module's version of the contract
    version: tuple[int, int]  # that this engine has
    built_in: tuple[str, ...]  # names that are taken


EXECUTOR = PlugInKind("executor", EXECUTORS, "EXECUTOR_API", EXECUTOR_API, BUILT_IN_EXECUTORS)


def import_plug_in(name: str, kind: PlugInKind = EXECUTOR) -> ModuleType:
    """Import the module registered under this name. It has create(config), which returns the part.

    Errors: ConfigError if no distribution registers the name, or several do; if the module cannot be imported or lacks
    create; if this engine does not support its version of the contract.
    """
    found = _find(name, kind)
    at = f"{kind.noun} {name!r} ({found.value}, of {_distribution(found)})"
    try:
        module = importlib.import_module(found.value)
    except ImportError as error:
        raise ConfigError(f"{at} cannot be imported: {error}") from error
    version = getattr(module, kind.version_name, None)
    if not _is_served(version, kind.version):
        major, minor = kind.version
        ours = f"({major}, 0) to ({major}, {minor})" if minor else f"({major}, 0)"
        raise ConfigError(f"{at} is written for {kind.version_name} {version!r}, but this engine supports {ours}")
    if not callable(getattr(module, "create", None)):
        raise ConfigError(f"{at} has no create(config)")
    return module


def _find(name: str, kind: PlugInKind) -> "EntryPoint":
    from importlib.metadata import entry_points  # takes 40 ms, and only plug-ins need it

    registered = entry_points(group=kind.group)
    found = {entry.value: entry for entry in registered if entry.name == name}  # a path may list one of them twice
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        owners = " and ".join(sorted(f"{_distribution(entry)} ({entry.value})" for entry in found.values()))
        raise ConfigError(f"{kind.noun} {name!r} is registered by {owners}: uninstall one of them")
    names = [*kind.built_in, *sorted(registered.names)]
    near = difflib.get_close_matches(name, names, n=1)
    raise ConfigError(
        f"there is no {kind.noun} {name!r}; available: {', '.join(names)}"
        + (f"; did you mean {near[0]}?" if near else f"; a plug-in registers its {kind.noun} in the group {kind.group}")
    )


def _distribution(entry: "EntryPoint") -> str:
    return "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def _is_served(version: object, ours: tuple[int, int]) -> bool:
    match version:
        case (int(major), int(minor)):
            return major == ours[0] and minor <= ours[1]
        case _:
            return False
