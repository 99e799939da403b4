"""Engine options from the environment and from a file: as the flags that they stand for, before those given.

What is nearer to the command wins: a flag over the file, the file over the environment.
"""

import os
import tomllib
from collections.abc import Sequence

from ipc.errors import ConfigError
from ipc.options.config import OPTIONS

CONFIG_FLAG = "--config"
PREFIX = "ENGINE_CORE_"
_CONNECT = "--connect"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def words_from_elsewhere(words: Sequence[str]) -> list[str]:
    """Return the flags of the environment and of the file that `words` name, with their values.

    Engines that run already have their options: beside --connect there are none. Errors: ConfigError.
    """
    words = words[: words.index("--")] if "--" in words else words
    if any(word.partition("=")[0] == _CONNECT for word in words):
        return []
    found = []
    for name in OPTIONS:
        value = os.environ.get(PREFIX + name.upper())
        if value:
            found += _words(name, value, PREFIX + name.upper())
    if (path := _path(words)) is not None:
        found += _words_of_file(path)
    return found


def _path(words: Sequence[str]) -> str | None:
    path = None
    for index, word in enumerate(words):
        flag, is_joined, value = word.partition("=")
        if flag == CONFIG_FLAG:
            path = value if is_joined else next(iter(words[index + 1 : index + 2]), None)
    return path


def _words_of_file(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{CONFIG_FLAG} {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{CONFIG_FLAG} {path} is no TOML: {error}") from None
    found = []
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            raise ConfigError(f"{CONFIG_FLAG} {path}: unknown option {key!r}; docs/options.md has all")
        parts = [f"{one}={part}" for one, part in value.items()] if isinstance(value, dict) else [value]
        for part in parts:
            text = str(part).lower() if isinstance(part, bool) else str(part)
            found += _words(name, text, f"{CONFIG_FLAG} {path}: {key}")
    return found


def _words(name: str, value: str, where: str) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if OPTIONS[name].plain is not bool:
        return [f"{flag}={value}"]
    if value.lower() not in (*_YES, *_NO):
        raise ConfigError(f"{where} must be yes or no; got {value!r:.80}")
    return [flag if value.lower() in _YES else "--no-" + flag.removeprefix("--")]
