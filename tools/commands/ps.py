"""`engine-core ps`: the models of a server with many: which are in memory, and until when."""

import json
from collections.abc import Sequence
from typing import Any

from tools.commands.list import bytes_in_words
from tools.flags.options import ArgumentParser
from tools.service.server_call import add_url, call_server

_NEVER = "9999"


def main(arguments: Sequence[str]) -> int:
    """Print the models, and return the exit status. Errors: ConfigError if no server answers."""
    parser = ArgumentParser(
        prog="engine-core ps",
        usage="engine-core ps [--all] [--json] [--url URL]",
        description="List the models that a server (`engine-core serve --models`) has in memory.",
    )
    parser.add_argument("--all", "-a", action="store_true", help="those that are not in memory too")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    add_url(parser)
    parsed = parser.parse_args(arguments)
    running = {_plain(one["name"]): one for one in call_server(parsed.url, "GET", "/api/ps")["models"]}
    # An adapter is in memory with its model.
    listed = [one for one in call_server(parsed.url, "GET", "/v1/models")["data"] if one.get("parent") is None]
    found = [_fields(one, running.get(one["id"], {})) for one in listed if parsed.all or one["id"] in running]
    if parsed.json:
        print("".join(f"{json.dumps(one)}\n" for one in found), end="")
        return 0
    rows = [("NAME", "STATE", "MEMORY", "UNTIL"), *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _plain(name: str) -> str:
    return name.removesuffix(":latest")


def _fields(listed: dict[str, Any], running: dict[str, Any]) -> dict[str, Any]:
    state, size = listed.get("state", "loaded"), listed.get("num_bytes")
    return {"name": listed["id"], "state": state, "bytes": size, "expires_at": running.get("expires_at")}


def _row(fields: dict[str, Any]) -> tuple[str, str, str, str]:
    until, size = fields["expires_at"] or "", fields["bytes"]
    until = "memory is needed" if until.startswith(_NEVER) else until[:19].replace("T", " ")
    return fields["name"], fields["state"], "" if size is None else bytes_in_words(size), until
