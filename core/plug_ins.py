"""Plug-ins: executors and schedulers of other distributions, found by the name they are registered under.

A distribution registers a module in an entry-point group (packaging.python.org, "Entry points specification"). Only a
plug-in that the config names is imported.
"""

import difflib
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from ipc.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class PlugInKind(NamedTuple):
    """One kind of plug-in: what it is called, where it registers, and the version of its interface."""

    noun: str  # "executor"
    group: str  # of entry points
    built_in: tuple[str, ...]  # names that are not plug-ins
    api: tuple[int, int]  # that this engine has: (major, minor)
    create: str = "create(config)"  # as its users read it

    @property
    def api_name(self) -> str:
        """Return the name under which a module states the version it is written for."""
        return f"{self.noun.upper()}_API"

    def import_module(self, name: str) -> ModuleType:
        """Import the module registered under this name. It has create().

        Errors: ConfigError if no distribution registers the name, or several do; if the module cannot be imported or
        lacks create; if this engine does not support its version of the interface.
        """
        found = self._find(name)
        at = f"{self.noun} {name!r} ({found.value}, of {_distribution(found)})"
        module = self.import_checked(found.value, at)
        if not callable(getattr(module, "create", None)):
            raise ConfigError(f"{at} has no {self.create}")
        return module

    def import_checked(self, path: str, at: str) -> ModuleType:
        """Import a module that is written for this engine's version of the interface. at: names it in errors.

        Errors: ConfigError.
        """
        try:
            module = importlib.import_module(path)
        except ImportError as error:
            raise ConfigError(f"{at} cannot be imported: {error}") from error
        version = getattr(module, self.api_name, None)
        if not self._is_served(version):
            major, minor = self.api
            ours = f"({major}, 0) to ({major}, {minor})" if minor else f"({major}, 0)"
            raise ConfigError(f"{at} is written for {self.api_name} {version!r}, but this engine supports {ours}")
        return module

    def _find(self, name: str) -> "EntryPoint":
        from importlib.metadata import entry_points  # takes 40 ms, and only plug-ins need it

        registered = entry_points(group=self.group)
        found = {entry.value: entry for entry in registered if entry.name == name}  # a path may list one of them twice
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            owners = " and ".join(sorted(f"{_distribution(entry)} ({entry.value})" for entry in found.values()))
            raise ConfigError(f"{self.noun} {name!r} is registered by {owners}: uninstall one of them")
        names = [*self.built_in, *sorted(registered.names)]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"a plug-in registers its {self.noun} in the group {self.group}"
        raise ConfigError(f"there is no {self.noun} {name!r}; available: {', '.join(names)}; {hint}")

    def _is_served(self, version: object) -> bool:
        match version:
            case (int(major), int(minor)):
                return major == self.api[0] and minor <= self.api[1]
            case _:
                return False


def _distribution(entry: "EntryPoint") -> str:
    return "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
