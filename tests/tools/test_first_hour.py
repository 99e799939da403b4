"""What a new user tries: defaults of serve, words of other engines, abbreviations that are none."""

import os
import subprocess
from pathlib import Path

import pytest

from ipc.errors import AddressError, ConfigError
from ipc.options import neutral_options
from ipc.options.neutral_options import is_switch
from tests.tools.test_cli import command, environment
from tools.cli import main as cli
from tools.command_table import COMMANDS, GROUPS
from tools.commands.http import add_http_options, http_address
from tools.flags import address
from tools.flags.hints import COMMANDS as OTHER_COMMANDS
from tools.flags.hints import FLAGS
from tools.flags.neutral_flags import without_neutral
from tools.flags.options import ArgumentParser, add_engine_options, engine_options


@pytest.fixture(name="home", autouse=True)
def a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


# --- serve without an address ---------------------------------------------------------------------------------------


def test_serve_listens_where_the_other_commands_look(home: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command(*words), env=environment(), capture_output=True, text=True, check=False)

    assert "start one with `engine-core serve`" in run("top", "--once").stderr
    with subprocess.Popen(
        command("serve", "--executor", "fake"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert f"ready at ipc://{home}/engine-core/engine.sock" in server.stdout.readline()
        assert "running 0/32" in run("top", "--once", "--interval", "0.1").stdout
        assert "0 of 32 rows run" in run("explain").stdout
        assert "is already served at" in run("serve", "--executor", "fake").stderr
        assert run("control", "pause").returncode == 0  # as the owner: the owner file is beside the socket
        assert run("control", "drain").returncode == 0
        assert server.wait(20) == 0
        server.communicate()
    assert not (home / "engine-core" / "engine.owner").exists()


def test_an_owner_file_of_an_engine_that_was_killed_is_no_obstacle(home: Path) -> None:
    stale = Path(address.default_owner_file())
    stale.write_text("00\n")
    assert address.fresh_owner_file() == str(stale)
    assert not stale.exists()
    assert address.owner_file_to_read(None, None) is None
    assert address.owner_file_to_read(None, "ipc:///x") is None
    assert address.owner_file_to_read("mine", None) == "mine"


def test_a_folder_that_others_can_write_is_refused(home: Path) -> None:
    (home / "engine-core").mkdir()
    os.chmod(home / "engine-core", 0o777)
    with pytest.raises(AddressError, match="not owned by this user alone"):
        address.default_address()
    (home / "engine-core").rmdir()
    (home / "engine-core").symlink_to("/tmp")
    with pytest.raises(AddressError, match="not owned by this user alone"):
        address.default_address()


# --- words of other engines -----------------------------------------------------------------------------------------


def test_abbreviations_are_off(capsys: pytest.CaptureFixture[str]) -> None:
    """-n is llama.cpp's number of tokens, and argparse took it for -np, the number of requests at once."""
    assert "the number of tokens is --max-tokens" in refused(capsys, "generate", "-n", "3", "hello")
    assert "unknown argument --max-num-se" in refused(capsys, "generate", "--max-num-se", "3", "hello")
    assert "threads must be" in refused_value(capsys, "generate", "-t0", "hello")


def refused_value(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli(words) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--data-parallel-size", "-ngl", "-md", "--spec-type", "--num-speculative-tokens"])
def test_a_flag_of_another_engine_gets_its_hint(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert FLAGS[flag] in refused(capsys, "serve", flag, "8")


def test_flags_of_vllm_that_change_nothing_are_accepted() -> None:
    words = [
        "--data-parallel-size=1",
        "a",
        "--trust-remote-code",
        "b",
        "--mamba-cache-dtype=auto",
        "--no-enable-dbo",
    ]
    words += ["-dp", "1", "--ubatch-size", "16", "--no-enable-log-requests", "--hf-overrides", "{}", "--max-num-seqs"]
    assert without_neutral([*words, "3"], ["--max-num-seqs"]) == ["a", "b", "--max-num-seqs", "3"]
    assert without_neutral(["--seed", "--", "--enable-dbo"], ()) == ["--seed", "--", "--enable-dbo"]
    assert without_neutral(["--node-rank", "2"], ["--node-rank"]) == ["--node-rank", "2"]


def test_switches_are_options_without_effect() -> None:
    """The others of them take a value, which is not the model's name."""
    assert neutral_options.SWITCHES < neutral_options.WITHOUT_EFFECT
    assert not is_switch("ubatch_size")
    assert not is_switch("tensor_parallel_size")
    assert is_switch("enable_eplb")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--enable-tower-connector-lora"],
            "argument --enable-tower-connector-lora: enable_tower_connector_lora=True is not",
        ),
        (["--data-parallel-rank", "1"], "argument --data-parallel-rank: data_parallel_rank=1 is not supported by this"),
        (["--data-parallel-rank"], "argument --data-parallel-rank: data_parallel_rank='' is not supported"),
    ],
)
def test_a_flag_of_vllm_that_asks_for_something_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "serve", *words)


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ([], None),
        (["--http", "h:1"], "h:1"),
        (["--port", "80"], "127.0.0.1:80"),
        (["--host", "::1"], "[::1]:8000"),
        (["--host", "0.0.0.0", "--port", "9"], "0.0.0.0:9"),
    ],
)
def test_host_and_port_are_the_address(words: list[str], address: str | None) -> None:
    parser = ArgumentParser()
    parser.add_argument("--http")
    add_http_options(parser)
    assert http_address(parser, parser.parse_args(words)) == address


def test_host_and_port_beside_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give --http or those two" in refused(capsys, "serve", "--http", "127.0.0.1:8000", "--port", "8001")


@pytest.mark.parametrize("word", ["llama-server"])
def test_a_command_of_another_engine_gets_its_hint(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert OTHER_COMMANDS[word] in refused(capsys, word)


def test_hints_are_for_what_does_not_exist() -> None:
    assert not set(OTHER_COMMANDS) & set(COMMANDS)
    done = subprocess.run(command("serve", "--help"), env=environment(), capture_output=True, text=True, check=True)
    ours = set(done.stdout.replace(",", " ").split())
    assert set(FLAGS) & ours == set()


def test_help_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{heading}:\n" in shown for heading in GROUPS)
    assert all(shown.count(f"\n  {name} ") == 1 for name in [*COMMANDS, "help", "version"])
    with pytest.raises(SystemExit) as ended:
        cli(["help", "top"])
    assert ended.value.code == 0
    assert "engine-core top" in capsys.readouterr().out


# --- options from the environment and from a file -------------------------------------------------------------------


def options(*words: str) -> dict[str, object]:
    parser = ArgumentParser()
    parser.add_argument("--connect")
    add_engine_options(parser)
    return engine_options(parser.parse_args(words))


def test_the_nearest_source_of_an_option_wins(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_CORE_MAX_NUM_SEQS", "8")
    monkeypatch.setenv("ENGINE_CORE_ENABLE_PREFIX_CACHING", "no")
    monkeypatch.setenv("ENGINE_CORE_SOMETHING_ELSE", "1")
    assert options() == {"max_num_seqs": 8, "enable_prefix_caching": False}
    file = home / "engine.toml"
    file.write_text(
        'max-num-seqs = 16\nscheduling_policy = "fair"\nreserve_full_length = true\nkv_cache_memory_bytes = "512M"\n'
        "[client_weights]\nonline = 4.0\nbatch = 0.5\n"
    )
    expected = {
        "max_num_seqs": 16,
        "enable_prefix_caching": False,
        "scheduling_policy": "fair",
        "reserve_full_length": True,
        "kv_cache_memory_bytes": 512 << 20,
        "client_weights": {"online": 4.0, "batch": 0.5},
    }
    assert options("--config", str(file)) == expected
    assert options(f"--config={file}", "--max-num-seqs", "32") == expected | {"max_num_seqs": 32}
    assert options("--connect", "ipc:///x") == {}  # an engine that runs has its options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seqs = ", "is not TOML"),
        ("max_num_rows = 3", "unknown option 'max_num_rows'"),
        ("enforce_eager = 3", "must be yes or no; got '3'"),
    ],
)
def test_a_bad_file_is_named(text: str, message: str, home: Path) -> None:
    file = home / "engine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"{file}.*{message}"):
        options("--config", str(file))
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        options("--config", str(home / "none.toml"))


def test_a_shorter_context_for_want_of_memory_is_said() -> None:
    def shown(*words: str) -> str:
        given = command("generate", "--executor", "fake", "--quiet", "--max-tokens", "2", *words, "5 6")
        done = subprocess.run(given, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    small = ("--kv-cache-memory-bytes", "320K", "--block-size", "16")  # of the fake executor: 4 KiB a token
    assert "max_model_len is 64 instead of the model's 131072: the KV cache is too small for more" in shown(*small)
    assert shown(*small, "--max-model-len", "64") == shown() == ""
    assert "model's 131072: the KV cache is too small for more (num_blocks_override)" in shown("--num-gpu-blocks", "20")
