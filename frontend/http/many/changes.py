"""Changes: pull, copy, create and delete a model of a catalog. Called on a thread, one change at a time."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from frontend.http.many.catalog import Catalog, entry_of, name_of
from frontend.http.many.messages import Change
from ipc.errors import ConfigError, EngineCoreError, ModelFileError
from ipc.files.hub import fetch_model
from ipc.files.hub_cache import remove_cached
from ipc.files.hub_name import is_hub_name, parse_hub_name
from ipc.files.model_files import resolve_model

_LOOK_S = 1.0  # between two lines of a download
Tell = Callable[[dict[str, Any]], None]


class Changes:
    """Changes of one catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()

    def make(self, change: Change, tell: Tell) -> None:
        """Make a change. tell: called with each step. Errors: ConfigError, ModelFileError, OSError."""
        with self._lock:
            {"pull": self._pull, "copy": self._copy, "create": self._create, "delete": self._delete}[change.kind](
                change, tell
            )

    def served_as(self, model: str) -> list[str]:
        """Return the names of the models with these files."""
        return [name for name, one in self._catalog.by_name.items() if model in (name, str(one.options.get("model")))]

    def _pull(self, change: Change, tell: Tell) -> None:
        entry = self._catalog.by_name.get(change.name)
        model = change.name if entry is None else entry.options.get("model")
        tell({"status": "pulling manifest"})
        if isinstance(model, str) and is_hub_name(model) and not Path(model).exists():
            _download(model, tell)
        else:
            resolve_model(model)  # for its errors: a local model has nothing to pull
        if entry is None:
            self._catalog.keep(entry_of(name_of(change.name), {"model": model}))

    def _copy(self, change: Change, tell: Tell) -> None:
        source = self._catalog.by_name.get(change.source)
        if source is None:
            raise ConfigError(f"there is no model {change.source!r:.200}")
        self._catalog.keep(msgspec.structs.replace(source, name=change.name, aliases=(), adapters={}, path=None))

    def _create(self, change: Change, tell: Tell) -> None:
        """Create a model from one that is served, or from files."""
        given, table = dict(change.options), dict[str, Any]()
        source = self._catalog.by_name.get(change.source)
        if source is None:
            table["model"] = change.source
            if not is_hub_name(change.source):
                resolve_model(change.source)
        else:
            table |= {**source.options, "keep_alive": source.keep_alive_s}
            own = ("system", "tool_call_parser", "reasoning_parser")
            table |= {name: value for name in own if (value := getattr(source, name)) is not None}
        parameters = {**table.get("override_generation_config", {}), **given.pop("override_generation_config", {})}
        table |= given | ({"override_generation_config": parameters} if parameters else {})
        tell({"status": "creating model"})
        entry = entry_of(change.name, table)
        before = self._catalog.by_name.get(change.name)
        if before is not None:
            self._catalog.remove(change.name)
        try:
            self._catalog.keep(entry)
        except EngineCoreError:
            if before is not None:
                self._catalog.keep(before)
            raise

    def _delete(self, change: Change, tell: Tell) -> None:
        """Remove a model, and its files if they are in the Hub's cache and no other model has them."""
        if change.name not in self._catalog.by_name:
            raise ConfigError(f"there is no model {change.name!r:.200}")
        entry = self._catalog.remove(change.name)
        model = entry.options.get("model")
        hub_name = parse_hub_name(model) if isinstance(model, str) and not Path(model).exists() else None
        if hub_name is not None and not self.served_as(str(model)):
            try:
                remove_cached(hub_name)
            except ModelFileError as error:  # it was not there
                tell({"status": str(error)})


def _download(model: str, tell: Tell) -> None:
    """Download a model, or update the cached copy, with a line each second. Errors: ModelFileError."""
    failure: list[Exception] = []
    begin = time.monotonic()

    def fetch() -> None:
        try:
            fetch_model(model, is_update=True)
        except Exception as error:  # raised below, in the thread that waits
            failure.append(error)

    thread = threading.Thread(target=fetch, name="pull", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        if thread.is_alive():
            tell({"status": f"downloading {model}: {time.monotonic() - begin:.0f} s"})
    if failure:
        raise failure[0]
