"""Flags of other engines' command lines: what asks for nothing is accepted, and no hint opens a server."""

import pytest

from ipc.errors import ConfigError
from tools.cli import main
from tools.flags.neutral_flags import without_neutral

KNOWN = ("--max-model-len", "--http")


@pytest.mark.parametrize(
    "words",
    [
        ["--seed", "0"],
        ["--seed=0"],
        ["--jinja"],
        ["--verbose"],
        ["--enable-prompt-tokens-details"],
        ["--no-webui"],
        ["--flash-attn"],
    ],
)
def test_what_asks_for_nothing_is_accepted(words: list[str]) -> None:
    assert without_neutral([*words, "--http", ":1"], KNOWN) == ["--http", ":1"]


def test_underscores_are_dashes() -> None:
    assert without_neutral(["--max_model_len", "5", "--max_model_len=6"], KNOWN) == [
        "--max-model-len",
        "5",
        "--max-model-len=6",
    ]
    assert without_neutral(["--un_known", "--", "--max_model_len"], KNOWN) == ["--un_known", "--", "--max_model_len"]


def test_a_flag_that_the_command_has_is_its_own() -> None:
    assert without_neutral(["--seed", "7"], ("--seed",)) == ["--seed", "7"]


def test_a_seed_of_the_server_is_refused_with_the_reason() -> None:
    for words in (["--seed", "7"], ["--seed=7"]):
        with pytest.raises(ConfigError, match=r"argument --seed: .* only 0 is: each request has its own seed"):
            without_neutral(words, KNOWN)


@pytest.mark.parametrize("flag", ["--insecur", "--secure", "--allow-request-template"])
def test_no_hint_opens_the_server(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", flag])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"unknown argument {flag}" in error
    assert "did you mean --insecure" not in error
    assert "did you mean --allow" not in error
