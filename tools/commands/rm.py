"""`engine-core rm`: remove models from the Hub's cache."""

from collections.abc import Sequence

from ipc.errors import ConfigError
from ipc.files.hub_cache import remove_cached
from ipc.files.hub_name import parse_hub_name
from tools.commands.list import bytes_in_words
from tools.flags.options import ArgumentParser


def main(arguments: Sequence[str]) -> int:
    """Remove the models, and return the exit status. Errors: ConfigError; ModelFileError for a model that is not in the
    cache.
    """
    parser = ArgumentParser(
        prog="engine-core rm",
        usage="engine-core rm MODEL ... [--quiet]",
        description="Remove models from the Hugging Face cache: a whole repository, or one of its GGUF files.",
        epilog="A running engine keeps its model's files until it ends.",
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name of `engine-core list`")
    parser.add_argument("--quiet", "-q", action="store_true", help="do not print what was freed")
    parsed = parser.parse_args(arguments)
    for model in parsed.models:
        name = parse_hub_name(model)
        if name is None:
            raise ConfigError(f"{model!r:.200} is not in `engine-core list`; files elsewhere must be removed by hand")
        freed = remove_cached(name)
        if not parsed.quiet:
            print(f"removed {name}, {bytes_in_words(freed)} freed")
    return 0
