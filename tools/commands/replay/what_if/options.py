"""The options of a what-if: NAME=VALUE, with several values for a sweep."""

import itertools
from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import msgspec

from ipc.errors import ConfigError
from ipc.options.config import OPTIONS, Config
from ipc.options.option import nearest

#: The changes from the captured engine, by option name.
Change: TypeAlias = dict[str, bool | int | float | str]
#: Options that affect only scheduling.
CHANGEABLE = {
    name: declared
    for name, declared in OPTIONS.items()
    if declared.option.group in ("scheduling", "preemption", "KV cache") and declared.plain is not dict
    if name not in ("client_weights", "kv_cache_memory_bytes", "swap_space_bytes")
}
_MAX_CHANGES = 256
_BOOLS = {"yes": True, "true": True, "no": False, "false": False}


def parse_changes(texts: Sequence[str]) -> list[Change]:
    """Return all combinations of the options' values.

    texts: NAME=VALUE or NAME=VALUE,VALUE,... Errors: ConfigError.
    """
    values: dict[str, list[bool | int | float | str]] = {}
    for text in texts:
        given, _, words = text.partition("=")
        name = given.strip().replace("-", "_")
        if name not in CHANGEABLE:
            near = nearest(name, CHANGEABLE)
            hint = f"did you mean {near}? " if near else ""
            raise ConfigError(
                f"--what-if {given:.80}: {hint}the options that affect scheduling are {', '.join(CHANGEABLE)}"
            )
        if name in values:
            raise ConfigError(f"--what-if {name} is given twice: give all values at once, as {name}=A,B")
        values[name] = [_value(name, word.strip()) for word in words.split(",")]
    count = prod(map(len, values.values()))
    if count > _MAX_CHANGES:
        raise ConfigError(f"--what-if asks for {count} combinations; the limit is {_MAX_CHANGES}")
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


def changed(config: Config, change: Change) -> Config:
    """Return the config with the change. Errors: ConfigError."""
    return type(config)(**{**msgspec.structs.asdict(config), **change})


def _value(name: str, word: str) -> bool | int | float | str:
    """Return the value of an option from its text; ResolvedConfig checks its range."""
    declared = CHANGEABLE[name]
    kind = declared.plain
    try:
        if kind is bool:
            return _BOOLS[word.lower()]
        return kind(word) if kind in (int, float) else word
    except (KeyError, ValueError):
        wanted = "yes or no" if kind is bool else f"a number {declared.bounds}"
        raise ConfigError(f"--what-if {name} must be {wanted}; got {word!r:.80}") from None
