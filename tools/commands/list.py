"""`engine-core list`: the models in the Hub's cache that an engine can load, with size, format and date."""

import json
import time
from collections.abc import Sequence

from ipc.files.hub_cache import cached_models
from tools.commands.list_known import print_known
from tools.flags.options import ArgumentParser

_UNITS = ("kB", "MB", "GB", "TB")  # powers of 1000, as on the Hub's pages


def main(arguments: Sequence[str]) -> int:
    """Print the models, and return the exit status. Errors: ModelFileError without huggingface_hub."""
    parser = ArgumentParser(
        prog="engine-core list",
        usage="engine-core list [--known] [--json | --quiet]",
        description="List the models in the Hugging Face cache that an engine can load, without network access.",
    )
    parser.add_argument("--known", action="store_true", help="list the models that could run instead")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quiet", "-q", action="store_true", help="names only")
    parsed = parser.parse_args(arguments)
    if parsed.known:
        print_known(as_json=parsed.json)
        return 0
    models = cached_models()
    if parsed.json:
        for model in models:
            fields = {"name": str(model.name), "format": model.format, "bytes": model.num_bytes}
            print(json.dumps(fields | {"modified": round(model.modified), "path": str(model.path)}))
        return 0
    if parsed.quiet:
        print("".join(f"{model.name}\n" for model in models), end="")
        return 0
    rows = [("NAME", "SIZE", "FORMAT", "DOWNLOADED")]
    for model in models:
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified))
        rows.append((str(model.name), bytes_in_words(model.num_bytes), model.format, date))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def bytes_in_words(count: int) -> str:
    """Return a number of bytes as text: 512 B, 4.9 GB."""
    amount, unit = float(count), "B"
    for larger in _UNITS:
        if amount < 999.5:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 99.5 else f"{amount:.1f} {unit}"
