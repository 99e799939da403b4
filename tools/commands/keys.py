"""`engine-core keys`: make keys for engines on a network, and set which clients may connect."""

import argparse
from collections.abc import Sequence

from ipc.keys.curve import add_client, limit_client, make_engine_keys, read_allowed, remove_client
from ipc.keys.quota import Quota, read_quota
from ipc.keys.signing import make_signing_key
from ipc.options.block_stores import make_key_file
from tools.flags.options import ArgumentParser

_USAGE = (
    "engine-core keys {new FOLDER | add FOLDER NAME FILE [LIMIT ...] | limit FOLDER NAME [LIMIT ...] | "
    "remove FOLDER NAME | list FOLDER | blocks FILE | receipts FILE}"
)
_LIMITS = {
    "concurrent": "unfinished requests at the same time",
    "rpm": "requests a minute",
    "tpm": "tokens a minute, of prompts and outputs",
}


def main(arguments: Sequence[str]) -> int:
    """Do one action on a folder of keys and return the exit status. Errors: ConfigError."""
    parser = ArgumentParser(
        prog="engine-core keys",
        usage=_USAGE,
        description="Manage keys of engines that listen on a network, at tcp://HOST:PORT?keys=FOLDER "
        "(docs/operations.md), and keys that sign receipts (docs/receipts.md).",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=ArgumentParser)
    for name, words, text in (
        ("new", ("folder",), "make an engine's keys in this folder"),
        ("add", ("folder", "name", "file"), "allow a client, and write its keys to a file for it"),
        ("limit", ("folder", "name"), "replace a client's limits"),
        ("remove", ("folder", "name"), "remove a client; its open connections stay"),
        ("list", ("folder",), "print the names of the clients that may connect"),
        ("blocks", ("file",), "write a new key for kv_key_file: engines with the same key find each other's KV blocks"),
        ("receipts", ("file",), "write a new key that signs receipts to FILE, and its public key to FILE.pub"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        for word in words:
            action.add_argument(word, metavar=word.upper())
        if name in ("add", "limit"):
            for limit, what in _LIMITS.items():
                action.add_argument(f"--{limit}", type=int, metavar="N", help=f"{what}; default: no limit")
    parsed = parser.parse_args(arguments)
    if parsed.action == "new":
        make_engine_keys(parsed.folder)
    elif parsed.action == "add":
        add_client(parsed.folder, parsed.name, parsed.file, _quota(parsed))
    elif parsed.action == "limit":
        limit_client(parsed.folder, parsed.name, _quota(parsed))
    elif parsed.action == "remove":
        remove_client(parsed.folder, parsed.name)
    elif parsed.action == "blocks":
        make_key_file(parsed.file)
    elif parsed.action == "receipts":
        print(make_signing_key(parsed.file))
    else:
        for client in read_allowed(parsed.folder).values():
            print(client.name, *client.quota.words())
    return 0


def _quota(parsed: argparse.Namespace) -> Quota:
    """Return the given limits. Errors: ConfigError for a limit that is not above 0."""
    given = Quota(parsed.concurrent, parsed.rpm, parsed.tpm)
    return read_quota(given.words(), "engine-core keys")
