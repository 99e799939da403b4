"""`engine-core stop`: let models of a server with many leave the memory."""

from collections.abc import Sequence

from tools.flags.options import ArgumentParser
from tools.service.server_call import add_url, call_server


def main(arguments: Sequence[str]) -> int:
    """Unload the models once they are idle, and return the exit status. Errors: ConfigError if the server refuses."""
    parser = ArgumentParser(
        prog="engine-core stop",
        usage="engine-core stop MODEL ... [--url URL]",
        description="Let models of a server (`engine-core serve --models`) leave the memory. Answers end first.",
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name of `engine-core ps`")
    add_url(parser)
    parsed = parser.parse_args(arguments)
    for model in parsed.models:
        call_server(parsed.url, "POST", "/api/generate", {"model": model, "keep_alive": 0, "stream": False})
        print(f"{model} leaves the memory once it is idle")
    return 0
