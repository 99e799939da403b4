"""`engine-core inspect`: what a model's files hold, what it needs in memory, what runs and what is refused."""

from collections.abc import Sequence

import msgspec

from core.model_files.inspection import Inspection, Needs, TypeUse, inspect_model
from ipc.files.hub_cache import find_cached
from ipc.files.model_files import resolve_model
from ipc.log_lines import counted
from tools.commands.list import bytes_in_words
from tools.flags.options import ArgumentParser

EXIT_REFUSED = 3


def main(arguments: Sequence[str]) -> int:
    """Print what is known of the model, and return the exit status: EXIT_REFUSED for a model that does not run.

    Errors: ModelFileError, UnsupportedModelError for files whose headers cannot be read.
    """
    parser = ArgumentParser(
        prog="engine-core inspect",
        usage="engine-core inspect [MODEL] [--json]",
        description="Say what a model's files hold, what it needs in memory, and what of it runs. No weight is read.",
        epilog=f"The exit status is {EXIT_REFUSED} if the model does not run.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder, a .gguf file, or a name in the Hub's cache; default: the demo",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parsed = parser.parse_args(arguments)
    found = inspect_model(resolve_model(find_cached(parsed.model)))
    print(msgspec.json.encode(found).decode() if parsed.json else "\n".join(_lines(found)))
    return 0 if found.runs_with else EXIT_REFUSED


def _lines(found: Inspection) -> list[str]:
    lines = [found.path, f"{found.format}, {bytes_in_words(found.file_bytes)} of tensors, {_named(found)}"]
    lines += ["", *_table([("TYPE", "TENSORS", "IN FILE", "IN MEMORY"), *map(_row, found.types)]), ""]
    if found.needs is not None:
        lines += [*_table(_needs_rows(found.needs, found.max_model_len)), ""]
    lines += [f"runs with {found.runs_with}"] if found.runs_with else []
    return lines + [f"refused: {reason}" for reason in found.refusals]


def _named(found: Inspection) -> str:
    named = f"architecture {found.architecture:.80}" if found.architecture else "no architecture"
    return f"{named}, packed as {found.packing}" if found.packing else named


def _row(use: TypeUse) -> tuple[str, ...]:
    if not use.runs:
        form = "refused"
    elif use.bits_in_memory is None:
        form = "converted"
    else:
        form = f"{use.bits_in_memory:g} bits a weight"
    return use.type, str(use.tensors), bytes_in_words(use.bytes), form


def _needs_rows(needs: Needs, length: int | None) -> list[tuple[str, ...]]:
    rows = list[tuple[str, ...]]()
    if needs.weights_as_stored is not None:
        rows.append(("weights, as stored", bytes_in_words(needs.weights_as_stored)))
    rows.append(("weights in bfloat16", bytes_in_words(needs.weights_dequantized)))
    rows.append(("KV cache in bfloat16", f"{bytes_in_words(needs.kv_cache_per_token)} a token"))
    if length is not None and needs.kv_cache_per_token:
        rows.append((f"  for {counted(length, 'token')}", bytes_in_words(needs.kv_cache_per_token * length)))
    if needs.state_per_request:
        rows.append(("recurrent states", f"{bytes_in_words(needs.state_per_request)} a request"))
    return rows


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
