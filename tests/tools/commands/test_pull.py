"""`engine-core pull`, `list` and `rm`: from a Hub on this machine to an engine that runs without it."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frontend.test_model_files_end_to_end import write_gguf
from tests.hub_server import HubServer, hub_server
from tests.tools.test_cli import command, environment
from tools.commands.list import bytes_in_words


@pytest.fixture(name="hub")
def a_hub(tmp_path: Path) -> Iterator[HubServer]:
    model = write_gguf(tmp_path / "model.gguf").read_bytes()
    files = {"m-Q4_K_M.gguf": model, "m-Q8_0.gguf": b"other", "README.md": b""}
    folder = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": b"0" * 2000}
    with hub_server({"org/gguf": files, "org/name": folder}) as server:
        yield server


def run(hub: HubServer, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words),
        env=environment() | hub.environment(home) | {"PYTHONPATH": environment()["PYTHONPATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_from_pull_to_rm(hub: HubServer, tmp_path: Path) -> None:
    assert run(hub, tmp_path, "list").stdout == "NAME  SIZE  FORMAT  DOWNLOADED\n"
    pulled = run(hub, tmp_path, "pull", "org/gguf:q4_k_m", "org/gguf:Q8_0", "org/name")
    assert (pulled.returncode, pulled.stderr) == (0, ""), "progress is for terminals"
    assert [line.split()[0] for line in pulled.stdout.splitlines()] == ["org/gguf:q4_k_m", "org/gguf:Q8_0", "org/name"]
    hub.repos.clear()  # from here on there is nothing to download

    rows = [json.loads(line) for line in run(hub, tmp_path, "list", "--json").stdout.splitlines()]
    assert [(row["name"], row["format"]) for row in rows] == [
        ("org/gguf:Q4_K_M", "GGUF"),
        ("org/gguf:Q8_0", "GGUF"),
        ("org/name", "safetensors"),
    ]
    assert rows[1]["bytes"] == 5
    assert rows[2]["bytes"] == 2004
    assert Path(rows[0]["path"]).name == "m-Q4_K_M.gguf"
    answered = run(hub, tmp_path, "run", "org/gguf:Q4_K_M", "hello you", "--max-tokens", "3", "--threads", "1")
    assert answered.returncode == 0, answered.stderr

    assert run(hub, tmp_path, "rm", "org/gguf:Q8_0").stdout == "removed org/gguf:Q8_0, 5 B freed\n"
    assert run(hub, tmp_path, "list", "--quiet").stdout == "org/gguf:Q4_K_M\norg/name\n"
    missing = run(hub, tmp_path, "rm", "org/gguf:Q8_0")
    assert missing.returncode == 1
    assert "org/gguf:Q8_0 is not in the cache, which has org/gguf:Q4_K_M" in missing.stderr
    assert run(hub, tmp_path, "rm", "org/gguf:Q4_K_M", "org/name", "--quiet").stdout == ""
    assert not list((tmp_path / "hub").glob("models--*"))


def test_errors_are_one_line(hub: HubServer, tmp_path: Path) -> None:
    for words, text in (
        (["pull", "org/gguf:Q5_0"], "org/gguf has no Q5_0; it has Q4_K_M, Q8_0 (such as org/gguf:Q4_K_M)"),
        (["pull", "name"], "'name' is not a name on the Hub"),
        (["rm", "/a/b"], "'/a/b' is not in `engine-core list`"),
    ):
        done = run(hub, tmp_path, *words)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"engine-core: error: {text}")


def test_bytes_in_words() -> None:
    sizes = (0, 999, 1000, 99_900, 999_600, 4_920_000_000, 5 * 10**15)
    assert list(map(bytes_in_words, sizes)) == ["0 B", "999 B", "1.0 kB", "100 kB", "1.0 MB", "4.9 GB", "5000 TB"]
