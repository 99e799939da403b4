"""The flags of an HTTP server that name how its model writes answers."""

import argparse
from pathlib import Path

import pytest

from ipc.errors import ConfigError
from ipc.keys.signing import make_signing_key
from tools.commands.http import add_http_options, read_http_options
from tools.flags.options import ArgumentParser


def parse(*words: str) -> argparse.Namespace:
    parser = ArgumentParser(prog="x")
    parser.add_argument("--http", default="127.0.0.1:8000")
    add_http_options(parser)
    return parser.parse_args(words)


def test_vllms_names_are_taken() -> None:
    given = ("--enable-auto-tool-choice", "--tool-call-parser", "llama3_json", "--reasoning-parser", "deepseek_r1")
    options = read_http_options(parse(*given, "--access-log"))
    assert (options.tool_call_parser, options.reasoning_parser) == ("llama3_json", "deepseek_r1")
    assert (options.access_log, options.log_format) == (True, "text")


def test_a_key_of_receipts_is_looked_at_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_http_options(parse("--receipt-key", str(path)))
    make_signing_key(str(path))
    assert read_http_options(parse("--receipt-key", str(path))).receipt_key == str(path)


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_a_name_that_is_not_known_is_refused_at_the_start(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} 'bogus' is not known; known: .*none"):
        read_http_options(parse(flag, "bogus"))
