"""Marks of images that somebody wrote in a message: these are text, and only what the template wrote is an image's."""

import re
from typing import Any, TypeVar

#: Stands for the mark while a template runs. No text has it by chance; who writes it gets the mark, as text.
_WRITTEN = "written-mark-9c1f0e5ad27b4c83"

_Data = TypeVar("_Data")


def hide_marks(data: _Data, mark: str) -> _Data:
    """Return a copy of messages, or of other variables of a template, in which no text has the mark."""
    return _hidden(data, mark)  # type: ignore[no-any-return]


def reveal_marks(prompt: str, mark: str) -> tuple[str, list[int]]:
    """Return a rendered prompt with its hidden marks as they were written, and which of all marks are images."""
    found = re.findall(f"{re.escape(mark)}|{_WRITTEN}", prompt)
    return prompt.replace(_WRITTEN, mark), [index for index, one in enumerate(found) if one == mark]


def _hidden(data: Any, mark: str) -> Any:
    if isinstance(data, str):
        return data.replace(mark, _WRITTEN)
    if isinstance(data, dict):
        return {_hidden(key, mark): _hidden(value, mark) for key, value in data.items()}
    return [_hidden(value, mark) for value in data] if isinstance(data, (list, tuple)) else data
