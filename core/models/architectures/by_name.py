"""The in-tree architectures by name. Code that reads files uses an architecture's row, and never compares names."""

from typing import Literal

from core.models.architectures.architecture import Architecture
from core.models.architectures.architecture_rows import ROWS

__all__ = ["ARCHITECTURES", "FORMS", "GGUF_ARCHITECTURES", "GGUF_ROUTED", "Architecture", "Form"]

ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in ROWS}
GGUF_ARCHITECTURES: dict[str, Architecture] = {row.gguf: row for row in ROWS if row.gguf is not None}
GGUF_ARCHITECTURES |= {name: row for row in ROWS for name in row.gguf_others}
#: By general.architecture, for files with experts whose name belongs to another row.
GGUF_ROUTED: dict[str, Architecture] = {
    row.experts.gguf: row for row in ROWS if row.experts is not None and row.experts.gguf is not None
}

#: What follows a checkpoint's layers: a language model's head, nothing, or a classifier of prompts.
Form = Literal["causal", "base", "classifier"]


def _forms(row: Architecture) -> dict[str, tuple[Architecture, Form]]:
    """Return the names in config.json's architectures for checkpoints with this row's layers.

    Of an architecture without a head there is one name.
    """
    if row.name == row.base_name:
        return {row.name: (row, "base")}
    stem = row.base_name.removesuffix("Model")
    return {
        row.name: (row, "causal"),
        row.base_name: (row, "base"),
        f"{stem}ForSequenceClassification": (row, "classifier"),
    }


#: By each supported name in config.json's architectures.
FORMS: dict[str, tuple[Architecture, Form]] = {name: form for row in ROWS for name, form in _forms(row).items()}
