"""Engine options on the command line: each has a flag, a help text, its aliases and a row in docs/options.md."""

import re

import pytest

from ipc.errors import ConfigError
from ipc.options.config import OPTIONS
from tests.make_options import PAGE, made
from tools.command_table import COMMANDS
from tools.commands.completion import declared_parser
from tools.flags.options import ArgumentParser, add_engine_options, aliases_of, engine_options, flag_of, help_of


def test_help_shows_every_option_with_its_text_and_default() -> None:
    parser = ArgumentParser(prog="x")
    add_engine_options(parser)
    shown = " ".join(parser.format_help().split()).replace("- ", "-")  # a line may end after a hyphen
    shown = shown[shown.index("engine options:") :]
    for name, declared in OPTIONS.items():
        text = re.escape(help_of(declared).replace("- ", "-"))
        heading = re.escape(f"engine options: {declared.option.group}: ")
        assert re.search(rf"{heading}((?!engine options).)*{flag_of(name)}[ ,][^;]*{text}", shown), name
    assert "share of the KV blocks that starting a request leaves free while others run; default: 0.01" in shown
    assert "reuse the KV blocks of equal prefixes; default: yes" in shown


def test_help_fits_a_terminal_and_an_address_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        parser = declared_parser(command)
        for line in parser.format_help().splitlines():
            is_one = " " not in line.strip() or line.startswith("  -")  # a word, or the names of a flag
            assert len(line) <= 80 or is_one, (command, line)
        for action in parser._actions:
            assert action.metavar != "PATH" or "address" not in str(action.help), (command, action.option_strings)


@pytest.mark.checkout  # docs/
def test_the_page_of_options_is_that_of_the_code() -> None:
    """docs/options.md: `make map` makes it."""
    assert PAGE.read_text() == made()
    assert made().count("\n| `--") == len(OPTIONS)


def test_every_option_has_a_flag_and_aliases_mean_the_same() -> None:
    parser = ArgumentParser(prog="x")
    add_engine_options(parser)
    assert engine_options(parser.parse_args([])) == {}
    values = {
        "model": "m",
        "mmproj": "p",
        "chat_template": "t",
        "scheduling_policy": "fcfs",
        "client_weights": "a=b=8",
        "executor_options": "a=b",
        "runner": "generate",
    }
    parsed = {"client_weights": {"a=b": 8.0}, "executor_options": {"a": "b"}}
    with_aliases = {name: aliases_of(declared) for name, declared in OPTIONS.items() if aliases_of(declared)}
    assert len(with_aliases) == 16
    for name, aliases in with_aliases.items():
        for flag in (*aliases, flag_of(name)):
            given = engine_options(parser.parse_args([flag, values.get(name, "8")]))
            assert given == {name: parsed.get(name, values.get(name, 8))}, flag
            assert flag not in aliases or f"{flag} " not in parser.format_help()
    flags = ["--client-weight", "a=2", "--client-weights", '{"b": 3}', "--client-weight", "a=4"]
    assert engine_options(parser.parse_args(flags)) == {"client_weights": {"a": 4.0, "b": 3.0}}
    flags = ["--no-enable-prefix-caching", "--async-scheduling", "--kv-cache-memory-bytes", "2G"]
    assert engine_options(parser.parse_args(flags)) == {
        "enable_prefix_caching": False,
        "async_scheduling": True,
        "kv_cache_memory_bytes": 2 << 30,
    }


def test_values_of_vllm_that_are_spelled_differently_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser(prog="x")
    add_engine_options(parser)
    assert engine_options(parser.parse_args(["--dtype", "float"])) == {"dtype": "float32"}
    with pytest.raises(SystemExit):
        parser.parse_args(["--dtype", "half"])
    assert "half is not one of auto, float32, bfloat16: bfloat16 takes the same memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MAX_NUM_SEQ", "8", "ENGINE_CORE_MAX_NUM_SEQ is no option; did you mean ENGINE_CORE_MAX_NUM_SEQS?"),
        ("MAX_NUM_SEQS", "many", "ENGINE_CORE_MAX_NUM_SEQS must be a number; got 'many'"),
        ("MAX_NUM_SEQS", "0", "ENGINE_CORE_MAX_NUM_SEQS: max_num_seqs must be an integer from 1"),
        ("KV_HOST_BYTES", "1 G", "ENGINE_CORE_KV_HOST_BYTES: expected bytes as 1048576, 512M or 2G"),
        ("DTYPE", "half", "ENGINE_CORE_DTYPE: half is not one of auto, float32, bfloat16"),
        ("DTYPE", "quarter", "ENGINE_CORE_DTYPE: dtype must be one of"),
        ("LIMIT_MM_PER_PROMPT", "image=two", "expected KIND=N"),
    ],
)
def test_a_wrong_variable_is_named(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"ENGINE_CORE_{variable}", value)
    parser = ArgumentParser(prog="x")
    add_engine_options(parser)
    with pytest.raises((ConfigError, SystemExit)) as raised:
        parser.parse_args([])
    assert said in f"{raised.value} {capsys.readouterr().err}"


def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets these for a service named engine-core."""
    for name in ("PORT", "SERVICE_HOST", "PORT_8000_TCP_ADDR", "API_KEY"):
        monkeypatch.setenv(f"ENGINE_CORE_{name}", "x")
    parser = ArgumentParser(prog="x")
    add_engine_options(parser)
    assert engine_options(parser.parse_args(["--limit-mm-per-prompt", "image=2"])) == {
        "limit_mm_per_prompt": {"image": 2}
    }
