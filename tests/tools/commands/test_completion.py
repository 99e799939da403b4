"""`engine-core completion`, as the shells themselves complete with it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.placed import PREFIX
from tests.tools.test_cli import command, environment
from tools.command_table import COMMANDS
from tools.commands.completion import declared_parser, words_before

#: A file may have any name, also one with the syntax of a shell.
EVIL = "$(touch pwned)`touch pwned`;touch pwned"
FILES = ("engine.toml", EVIL, "it's")
#: What bash sets when it completes, and no shell of its own to tell options to.
BASH = """
source "$1"; COMP_LINE=$2 COMP_POINT=${#2} COMP_TYPE=9; compopt() { return 1; }
_python_argcomplete engine-core
((${#COMPREPLY[@]} == 0)) || printf "%s\\n" "${COMPREPLY[@]}"
"""


@pytest.fixture(name="scripts", scope="module")
def the_scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each shell, an engine-core, a cache with two models, and files to complete."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        done = subprocess.run(command("completion", shell), env=environment(), capture_output=True, check=True)
        (folder / shell).write_bytes(done.stdout)
    program = folder / "bin" / "engine-core"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import sys; from {PREFIX}tools.cli import main; sys.exit(main())'\n"
    )
    program.chmod(0o755)
    for name, file in (("name", "model.safetensors"), ("gguf", "m-Q4_K_M.gguf")):
        snapshot = folder / "hub" / f"models--org--{name}" / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / file).write_bytes(b"0")
        (snapshot / "config.json").write_text("{}")
        (snapshot / "tokenizer.json").write_text("{}")
        refs = folder / "hub" / f"models--org--{name}" / "refs"
        refs.mkdir()
        (refs / "main").write_text("0" * 40)
    (folder / "here").mkdir()
    for file in FILES:
        (folder / "here" / file).touch()
    return folder


def paths(scripts: Path) -> dict[str, str]:
    place = {
        "PATH": f"{scripts / 'bin'}:{os.environ['PATH']}",
        "HOME": str(scripts),
        "HF_HUB_CACHE": str(scripts / "hub"),
    }
    return environment() | place | {"LC_ALL": "C.UTF-8"}


def in_bash(scripts: Path, line: str) -> list[str]:
    """What bash would offer at the end of this line, without the blank behind a single word."""
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH, "bash", f"{scripts}/bash", line],
        env=paths(scripts),
        cwd=scripts / "here",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return [word.removesuffix(" ") for word in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("engine-core se", ["serve"]),
        ("engine-core help tr", ["traces"]),
        ("engine-core serve --dty", ["--dtype"]),
        ("engine-core serve --dtype=b", ["bfloat16"]),
        ("engine-core run --dtype auto --load-format g", ["gguf"]),
        ("engine-core serve --threads ", []),
        ("engine-core serve --config e", ["engine.toml"]),
        ("engine-core serve --model org/n", ["org/name"]),
        ("engine-core chat org/gguf:Q4", ["Q4_K_M"]),  # bash replaces what stands behind the colon
        ("engine-core nothing --x", []),
    ],
)
def test_bash_completes(scripts: Path, line: str, expected: list[str]) -> None:
    assert in_bash(scripts, line) == expected


def test_a_name_with_the_syntax_of_a_shell_is_quoted(scripts: Path) -> None:
    """What TAB inserts is one word of the line, and runs nothing, now or when Enter is pressed."""
    found = in_bash(scripts, "engine-core chat -m ")
    read = subprocess.run(
        ["bash", "-c", "printf '%s\\n' " + " ".join(found)], capture_output=True, text=True, check=True
    )
    assert set(read.stdout.splitlines()) == {"org/name", "org/gguf:Q4_K_M", *FILES}
    assert sorted(path.name for path in (scripts / "here").iterdir()) == sorted(FILES)


def test_every_command_and_flag_is_offered(scripts: Path) -> None:
    assert set(in_bash(scripts, "engine-core ")) == {*COMMANDS, "help", "version"}
    for name in COMMANDS:
        assert declared_parser(name).prog.startswith("engine-core"), name
    shown = subprocess.run(command("top", "--help"), env=environment(), capture_output=True, text=True, check=True)
    names = {"-h", *re.findall(r"(?<![\w`-])--[a-z-]+", shown.stdout.partition("options:")[2])}
    assert set(in_bash(scripts, "engine-core top -")) == names


def test_the_words_before_the_cursor() -> None:
    assert words_before("engine-core serve --d", 21) == ["engine-core", "serve"]
    assert words_before("engine-core serve --d", 18) == ["engine-core", "serve"]
    assert words_before("engine-core", 11) == []


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_takes_the_script(scripts: Path) -> None:
    script = f"autoload -U compinit; compinit -D; source {scripts}/zsh; print $_comps[engine-core]"
    done = subprocess.run(["zsh", "-f", "-c", script], env=paths(scripts), capture_output=True, text=True, check=False)
    assert done.stdout == "_python_argcomplete\n", done.stderr


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [("engine-core se", {"serve"}), ("engine-core serve --dtype ", {"auto", "float32", "bfloat16"})],
)
def test_fish_completes(scripts: Path, line: str, expected: set[str]) -> None:
    script = f"source {scripts}/fish; complete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], env=paths(scripts), capture_output=True, text=True, check=True
    )
    assert {each.split("\t")[0].strip() for each in done.stdout.splitlines()} == expected
