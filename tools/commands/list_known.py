"""`engine-core list --known`: the models that run on this engine's own code, whether they are here or not."""

import json

import msgspec

from core.model_files.known_models import known_models

_HEAD = ("MODELS", "ARCHITECTURE", "FILES", "IMAGES", "ADAPTERS", "MTP", "LEVEL")


def print_known(*, as_json: bool) -> None:
    """Print them as a table, or one JSON object a line."""
    known = known_models()
    if as_json:
        print("".join(f"{json.dumps(msgspec.to_builtins(one))}\n" for one in known), end="")
        return
    rows: list[tuple[str, ...]] = [_HEAD]
    for one in known:
        words = ["yes" if value else "no" for value in (one.images, one.mtp)]
        rows.append((one.models, one.architecture, one.files, words[0], one.adapters, *words[1:], one.level))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
