"""Catalog: the models of a server, from a TOML file, a folder, or names; and how long they stay in memory."""

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from frontend.http.many.messages import MAX_CREATED
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options
from ipc.options.option import parse_bytes

DEFAULT_KEEP_ALIVE_S = 300.0
#: A model's name: it becomes a file's name in a folder of models, if it is created there.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,199}")
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
#: Keys of a model that are no options of its engine, and their types.
_OWN_KEYS: dict[str, Any] = {
    "keep_alive": float | int | str,
    "aliases": tuple[str, ...],
    "adapters": dict[str, str],
    "tool_call_parser": str,
    "reasoning_parser": str,
    "system": str,
    "is_created": bool,
}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One model. options: of its engine, under the names of EngineConfig. path: the file that holds it, if it is alone
    there. is_created: by a caller.
    """

    name: str
    options: dict[str, Any]
    keep_alive_s: float
    aliases: tuple[str, ...] = ()
    adapters: dict[str, str] = {}
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    system: str | None = None
    path: str | None = None
    is_created: bool = False

    def config(self) -> EngineConfig:
        """Return its engine's configuration. Errors: ConfigError that names the model."""
        adapters = {"enable_lora": True, "lora_modules": self.adapters} if self.adapters else {}
        try:
            return config_from_options(**{**adapters, **self.options})
        except ConfigError as error:
            raise ConfigError(f"the model {self.name!r}: {error}") from None


class Catalog:
    """All models by name. memory: bytes for all of them, as the file says; None = it does not. folder: where created
    models are kept; None = nowhere, so that they are gone when the server ends.
    """

    def __init__(self, entries: list[Entry], memory: int | None = None, folder: Path | None = None) -> None:
        self.by_name: dict[str, Entry] = {}
        self.memory, self.folder = memory, folder
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Add a model. Errors: ConfigError for a name that is taken or cannot be one."""
        taken = {one for other in self.by_name.values() for one in (other.name, *other.aliases, *other.adapters)}
        for name in {entry.name, *entry.aliases, *entry.adapters}:
            if not NAME.fullmatch(name):
                raise ConfigError(f"{name!r:.80} cannot name a model: letters, digits and ._:@/+- are allowed")
            if name in taken:
                raise ConfigError(f"two models have the name {name!r:.200}")
            taken.add(name)
        self.by_name[entry.name] = entry

    def keep(self, entry: Entry) -> Entry:
        """Add a created model, and write it into the folder, if there is one. Errors: ConfigError."""
        if sum(one.is_created for one in self.by_name.values()) >= MAX_CREATED:
            raise ConfigError(f"there are {MAX_CREATED} created models; delete one before you create another")
        entry = msgspec.structs.replace(entry, is_created=True)
        if self.folder is not None:
            path = self.folder / f"{entry.name.replace('/', '--').replace(':', '--')}.toml"
            if path.exists():
                raise ConfigError(
                    f"{entry.name!r:.200} would be written over {path.name}, which is another model's file"
                )
            entry = msgspec.structs.replace(entry, path=str(path))
            self.add(entry)
            path.write_text(_toml(_as_table(entry)), encoding="utf-8")
            return entry
        self.add(entry)
        return entry

    def remove(self, name: str) -> Entry:
        """Remove a model, and its file in the folder."""
        entry = self.by_name.pop(name)
        if entry.path is not None:
            Path(entry.path).unlink(missing_ok=True)
        return entry


def read_catalog(text: str, defaults: Mapping[str, Any]) -> Catalog:
    """Return the models that `--models` names: a TOML file, a folder, or names and paths with commas between them.

    defaults: options of every engine that its own do not replace. Errors: ConfigError.
    """
    path = Path(os.path.expanduser(text))
    if path.suffix == ".toml":
        return _from_file(path, defaults)
    if path.is_dir() and not (path / "config.json").is_file():
        return _from_folder(path, defaults)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--models takes a TOML file, a folder, or names with commas between them")
    return Catalog([_entry(name_of(name), {"model": name}, defaults, DEFAULT_KEEP_ALIVE_S) for name in names])


def name_of(model: str) -> str:
    """Return the name under which a model is served: the last part of a path, or its name on the Hub."""
    path = Path(os.path.expanduser(model))
    return path.resolve().name.removesuffix(".gguf") if path.exists() or path.is_absolute() else model


def entry_of(name: str, table: Mapping[str, Any], *, keep_alive_s: float = DEFAULT_KEEP_ALIVE_S) -> Entry:
    """Return the model of a table, whose engine's options are checked. Errors: ConfigError."""
    return _entry(name, table, {}, keep_alive_s)


def keep_alive_s(given: object) -> float:
    """Return seconds: of a number of them, or of a text such as 90s, 5m or 1h30m; below 0 = inf. Errors: ValueError."""
    text = str(given).strip()
    sign, text = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise ValueError(_wrong(given))
    if _DURATION.fullmatch(text):
        seconds = sum(float(count) * _SECONDS[unit] for count, unit in _PART.findall(text))
    else:
        try:
            seconds = float(text)
        except ValueError:
            raise ValueError(_wrong(given)) from None
    if math.isnan(seconds):
        raise ValueError(_wrong(given))
    return math.inf if sign < 0 and seconds > 0 else abs(seconds)


def _wrong(given: object) -> str:
    return f"keep_alive is a number of seconds, or a text such as 90s, 5m, 1h30m or -1; got {given!r:.80}"


def _from_file(path: Path, defaults: Mapping[str, Any]) -> Catalog:
    table = _read_toml(path)
    models = table.pop("models", None)
    kept, memory = _keep_alive(table.pop("keep_alive", DEFAULT_KEEP_ALIVE_S), path), table.pop("memory", None)
    if table or not isinstance(models, dict) or not models:
        known = "its keys are memory, keep_alive, and a table [models.NAME] for each model"
        raise ConfigError(f"{path}: {known}" + (f"; got {', '.join(table)}" if table else ""))
    try:
        size = None if memory is None else parse_bytes(str(memory))
    except ValueError as error:
        raise ConfigError(f"{path}: memory: {error}") from None
    return Catalog([_entry(name, one, defaults, kept) for name, one in models.items()], size)


def _from_folder(folder: Path, defaults: Mapping[str, Any]) -> Catalog:
    found = dict[str, Entry]()
    for path in sorted(folder.iterdir()):
        if path.suffix == ".toml":
            table = _read_toml(path)
            name = str(table.pop("name", path.stem))
            entry = _entry(name, table, defaults, DEFAULT_KEEP_ALIVE_S)
            found[name] = msgspec.structs.replace(entry, path=str(path))
        elif path.suffix == ".gguf" or (path / "config.json").is_file():
            found.setdefault(name_of(str(path)), _entry(name_of(str(path)), {"model": str(path)}, defaults, 300.0))
    return Catalog(list(found.values()), folder=folder.resolve())


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _entry(name: str, table: object, defaults: Mapping[str, Any], kept_s: float) -> Entry:
    if not isinstance(table, Mapping):
        raise ConfigError(f"the model {name!r} must be a table of options")
    given = dict(table)
    own = {key: given.pop(key) for key in _OWN_KEYS if key in given}
    for key, value in own.items():
        try:
            own[key] = msgspec.convert(value, _OWN_KEYS[key])
        except msgspec.ValidationError as error:
            raise ConfigError(f"the model {name!r}: {key}: {error}") from None
    if "keep_alive" in own:
        kept_s = _keep_alive(own.pop("keep_alive"), f"the model {name!r}")
    entry = Entry(name=name, options={**defaults, **given}, keep_alive_s=kept_s, **own)
    entry.config()
    return entry


def _keep_alive(given: object, place: object) -> float:
    try:
        return keep_alive_s(given)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def _as_table(entry: Entry) -> dict[str, Any]:
    kept = "-1" if math.isinf(entry.keep_alive_s) else entry.keep_alive_s
    own = {key: getattr(entry, key) for key in _OWN_KEYS if key != "keep_alive" and getattr(entry, key)}
    return {"name": entry.name, "keep_alive": kept, **own, **entry.options}


def _toml(table: Mapping[str, Any]) -> str:
    return "".join(f"{_toml_value(key)} = {_toml_value(value)}\n" for key, value in table.items())


def _toml_value(value: object) -> str:
    """Return a value as TOML, whose texts, numbers and lists are as in JSON."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml_value(key)} = {_toml_value(one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return json.dumps(value).replace("\x7f", "\\u007f")
