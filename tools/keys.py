"""`engine-core keys`: make the keys with which an engine is reached over a network, and say which clients may."""

from collections.abc import Sequence

from ipc.curve import add_client, make_engine_keys, read_allowed, remove_client
from tools.options import ArgumentParser

_USAGE = "engine-core keys {new FOLDER | add FOLDER NAME FILE | remove FOLDER NAME | list FOLDER}"


def main(arguments: Sequence[str]) -> int:
    """Do one action on a folder of keys and return the exit status. Errors: ConfigError."""
    parser = ArgumentParser(
        prog="engine-core keys",
        usage=_USAGE,
        description="Keys of engines that listen on a network, at tcp://HOST:PORT?keys=FOLDER (docs/operations.md).",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=ArgumentParser)
    for name, words, text in (
        ("new", ("folder",), "make an engine's keys in this folder"),
        ("add", ("folder", "name", "file"), "allow a client, and write its keys to a file that it is to get"),
        ("remove", ("folder", "name"), "let a client in no more; a connection that it has stays"),
        ("list", ("folder",), "print the names of the clients that may connect"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        for word in words:
            action.add_argument(word, metavar=word.upper())
    parsed = parser.parse_args(arguments)
    if parsed.action == "new":
        make_engine_keys(parsed.folder)
    elif parsed.action == "add":
        add_client(parsed.folder, parsed.name, parsed.file)
    elif parsed.action == "remove":
        remove_client(parsed.folder, parsed.name)
    else:
        print("".join(f"{name}\n" for name in read_allowed(parsed.folder).values()), end="")
    return 0
