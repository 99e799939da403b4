"""`engine-core rm`: remove models from the Hub's cache."""

from collections.abc import Sequence

from ipc.errors import ConfigError
from ipc.files.hub_cache import remove_cached
from ipc.files.hub_name import parse_hub_name
from tools.commands.list import bytes_in_words
from tools.flags.options import ArgumentParser


def main(arguments: Sequence[str]) -> int:
    """Remove the models, and return the exit status. Errors: ConfigError; ModelFileError for one that is not there."""
    parser = ArgumentParser(
        prog="engine-core rm",
        usage="engine-core rm MODEL ... [--quiet]",
        description="Remove models from the Hugging Face cache: all of a repository, or one GGUF file of it.",
        epilog="An engine that runs keeps the files of its model until it ends.",
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name of `engine-core list`")
    parser.add_argument("--quiet", "-q", action="store_true", help="do not say what was freed")
    parsed = parser.parse_args(arguments)
    for model in parsed.models:
        name = parse_hub_name(model)
        if name is None:
            raise ConfigError(f"{model!r:.200} is no name of `engine-core list`; files elsewhere are yours to remove")
        freed = remove_cached(name)
        if not parsed.quiet:
            print(f"removed {name}, {bytes_in_words(freed)} freed")
    return 0
