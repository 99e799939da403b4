"""Checks of generate()'s and chat()'s arguments other than prompts and sampling parameters."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ipc.errors import ConfigError, InvalidRequestError, UnsupportedParameterError
from ipc.log_lines import counted

_MAX_PRIORITY = 2**31 - 1
_MAX_DEADLINE_S = 1e9  # AddRequest counts milliseconds up to 2**40
#: Template variables that chat_template_kwargs must not set. Others of chat()'s arguments are allowed, as in vLLM.
_RESERVED_KWARGS = ("template", "chat_template", "messages", "bos_token", "eos_token", "image_mark")
#: Arguments of vLLM's generate() and chat(), with the values under which they change nothing here.
_NEUTRAL_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "tokenization_kwargs": (None, {}),
    "chat_template_content_format": ("auto",),
}


def check_neutral(**arguments: object) -> None:
    """Check that arguments that only vLLM supports have a neutral value. Errors: UnsupportedParameterError."""
    for name, value in arguments.items():
        if value not in _NEUTRAL_ARGUMENTS[name]:
            allowed = _NEUTRAL_ARGUMENTS[name][0]
            raise UnsupportedParameterError(
                f"{name}={value!r:.80} is not supported by this version; leave it at its default ({allowed!r})"
            )


def read_template_kwargs(kwargs: object) -> dict[str, Any]:
    """Return chat_template_kwargs as variables of a template. Errors: InvalidRequestError."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise InvalidRequestError(f"chat_template_kwargs must be a dict with str keys; got {kwargs!r:.80}")
    if taken := [name for name in _RESERVED_KWARGS if name in kwargs]:
        raise InvalidRequestError(f"chat_template_kwargs must not name {', '.join(taken)}: they are set in other ways")
    return dict(kwargs)


def read_deadline(seconds: object) -> float | None:
    """Return a deadline in `seconds` from now as monotonic time; None = no deadline. Errors: InvalidRequestError."""
    if seconds is None:
        return None
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= _MAX_DEADLINE_S:  # type: ignore[operator]
        raise InvalidRequestError(
            f"deadline must be a number of seconds above 0 and up to {_MAX_DEADLINE_S:g}; got {seconds!r:.80}"
        )
    return time.monotonic() + seconds  # type: ignore[operator]


def wrong_number(name: str, num_prompts: int, got: int) -> InvalidRequestError:
    """Return the error for an argument that is given for each prompt, but not as often as there are prompts."""
    prompts = counted(num_prompts, "prompt needs", "prompts need")
    return InvalidRequestError(f"{prompts} one {name} each, or one for all; got {got}")


def read_priorities(priority: int | Sequence[int] | None, count: int) -> list[int]:
    """Return one priority for each of `count` prompts; None = 0. Errors: InvalidRequestError."""
    priorities = [priority or 0] * count if priority is None or isinstance(priority, int) else list(priority)
    if len(priorities) != count:
        raise wrong_number("priority", count, len(priorities))
    for one in priorities:
        if isinstance(one, bool) or not isinstance(one, int) or abs(one) > _MAX_PRIORITY:
            raise InvalidRequestError(f"a priority must be an integer within +-{_MAX_PRIORITY}, got {one!r}")
    return priorities


def read_path(name: str, value: object) -> str | None:
    """Return a path or a name as text; None = not given. Errors: ConfigError."""
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(path, str):
        raise ConfigError(f"{name} must be a path or a name, as a str or a pathlib.Path; got {value!r:.80}")
    return path
