"""Flags of other engines' command lines: what asks for nothing is accepted, and no hint opens a server."""

import re

import pytest

from ipc.errors import ConfigError
from tools.cli import main
from tools.flags.hints import FLAGS
from tools.flags.neutral_flags import VALUES, without_neutral

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
        ["--flash-attn", "on"],
        ["-fa", "auto"],
        ["-ngl", "0"],
        ["--cache-type-k=f16"],
        ["--threads-batch", "4"],
        ["--embeddings"],
        ["--no-mmap"],
        ["--spec-type", "none"],
        ["--chat-template-content-format", "auto"],
        ["--structured-outputs-config.backend", "auto"],
        ["--uvicorn-log-level", "warning"],
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
        with pytest.raises(ConfigError, match=r"argument --seed: .* only 0 or -1 is: each request has its own seed"):
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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--n-predict", "5"], "requests say max_tokens"),
        (["-n", "5"], "requests say max_tokens"),
        (["--temp", "0.5"], "requests say temperature; defaults are set by --override-generation-config NAME=X"),
        (["--repeat-penalty", "1.1"], "requests say repetition_penalty"),
        (["--typical", "0.5"], "requests say typical_p"),
        (["--ignore-eos"], "requests say ignore_eos"),
        (["--batch-size", "512"], "--max-num-batched-tokens"),
        (["-mu", "http://x"], "a model is a folder"),
        (["--cache-type-k", "q8_0"], "only f16 or bf16 is: use --kv-cache-dtype"),
        (["-ngl", "99"], "only 0 is: a model is on the GPU completely"),
        (["--lora-module", "x"], "it is --lora-modules"),
        (["--return-tokens-as-token-ids"], "requests ask for it"),
        (["--structured-outputs-config.backend", "outlines"], "grammars are run by llguidance"),
        (["--response-role", "model"], "the role of an answer is assistant"),
        (["--enable-per-request-metrics"], "--no-request-metrics"),
    ],
)
def test_what_peers_call_otherwise_is_refused_with_what_to_do(
    capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", *words])
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_every_flag_that_a_hint_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "generate"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
    shown = capsys.readouterr().out
    texts = [*FLAGS.values(), *(instead for _, instead in VALUES.values())]
    named = {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)}
    assert {flag for flag in named if flag not in shown} == set()
