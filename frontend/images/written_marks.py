"""Image marks that a user wrote in a message: they are text; only the template's marks are images."""

import re
from typing import Any, TypeVar

#: Replaces the mark while a template runs. No text contains it by chance; if a user writes it, it becomes the mark, as
#: text.
_WRITTEN = "written-mark-9c1f0e5ad27b4c83"

_Data = TypeVar("_Data")


def hide_marks(data: _Data, mark: str) -> _Data:
    """Return a copy of messages, or of other variables of a template, in which no text contains the mark."""
    return _hidden(data, mark)  # type: ignore[no-any-return]


def reveal_marks(prompt: str, mark: str) -> tuple[str, list[int]]:
    """Return a rendered prompt with the users' marks restored, and the indices of the marks that are images."""
    found = re.findall(f"{re.escape(mark)}|{_WRITTEN}", prompt)
    return prompt.replace(_WRITTEN, mark), [index for index, one in enumerate(found) if one == mark]


def _hidden(data: Any, mark: str) -> Any:
    if isinstance(data, str):
        return data.replace(mark, _WRITTEN)
    if isinstance(data, dict):
        return {_hidden(key, mark): _hidden(value, mark) for key, value in data.items()}
    return [_hidden(value, mark) for value in data] if isinstance(data, (list, tuple)) else data
