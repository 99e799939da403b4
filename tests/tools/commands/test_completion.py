"""`engine-core completion`, as the shells themselves complete with it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tools.test_cli import command, environment
from tools.cli import COMMANDS
from tools.commands.completion import declared_commands


@pytest.fixture(name="scripts", scope="module")
def the_scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each shell, and with an engine-core that knows two models."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        done = subprocess.run(command("completion", shell), env=environment(), capture_output=True, check=True)
        (folder / shell).write_bytes(done.stdout)
    program = folder / "bin" / "engine-core"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n[ \"$*\" = 'list --quiet' ] && printf 'org/name\\norg/gguf:Q4_K_M\\norg/gguf:Q8_0\\n"
        "evil/gguf:$(touch pwned)`touch pwned`.gguf\\n'\n"
    )
    program.chmod(0o755)
    (folder / "here").mkdir()
    (folder / "here" / "engine.toml").touch()
    return folder


def paths(scripts: Path) -> dict[str, str]:
    return os.environ | {"PATH": f"{scripts / 'bin'}:{os.environ['PATH']}", "HOME": str(scripts), "LC_ALL": "C"}


def in_bash(scripts: Path, line: str) -> list[str]:
    """What bash would offer at the end of this line."""
    script = (
        f"source {scripts}/bash; COMP_LINE=$1 COMP_POINT=${{#1}}; _engine_core; "
        '((${#COMPREPLY[@]} == 0)) || printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", line],
        env=paths(scripts),
        cwd=scripts / "here",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("engine-core se", ["serve"]),
        ("engine-core help tr", ["traces"]),
        ("engine-core serve --dty", ["--dtype"]),
        ("engine-core serve --dtype ", ["auto", "float32", "bfloat16"]),
        ("engine-core serve --dtype=b", ["bfloat16"]),
        ("engine-core run --dtype auto --load-format g", ["gguf"]),
        ("engine-core serve --no-enable-pre", ["--no-enable-prefix-caching"]),
        ("engine-core serve --threads ", []),
        ("engine-core serve --config ", ["engine.toml"]),
        ("engine-core rm org/n", ["org/name"]),
        ("engine-core serve --model org/n", ["org/name"]),
        # A file may have any name. It is quoted, as it will stand on the command line.
        ("engine-core rm ev", ["evil/gguf:\\$\\(touch\\", "pwned\\)\\`touch\\", "pwned\\`.gguf"]),
        ("engine-core chat org/gguf:Q4", ["Q4_K_M"]),  # bash replaces what stands behind the colon
        ("engine-core chat org/gguf:", ["Q4_K_M", "Q8_0"]),
        ("engine-core control dr", ["drain"]),
        ("engine-core bench start", ["startup"]),
        ("engine-core completion ", ["bash", "zsh", "fish"]),
        ("engine-core nothing --x", []),
    ],
)
def test_bash_completes(scripts: Path, line: str, expected: list[str]) -> None:
    assert in_bash(scripts, line) == expected
    assert sorted(path.name for path in (scripts / "here").iterdir()) == ["engine.toml"]


def test_every_command_and_flag_is_declared(scripts: Path) -> None:
    commands = {one.name: one for one in declared_commands()}
    assert set(commands) == {*COMMANDS, "help", "version"}
    assert set(in_bash(scripts, "engine-core ")) == set(commands)
    shown = subprocess.run(command("top", "--help"), env=environment(), capture_output=True, text=True, check=True)
    names = {name for flag in commands["top"].flags for name in flag.names}
    assert names == {"-h", *re.findall(r"(?<![\w`-])--[a-z-]+", shown.stdout.partition("options:")[2])}
    assert set(in_bash(scripts, "engine-core top -")) == names


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_takes_the_script(scripts: Path) -> None:
    script = (
        f"autoload -U compinit; compinit -D; source {scripts}/zsh; print $_comps[engine-core]; whence -w _engine_core"
    )
    done = subprocess.run(["zsh", "-f", "-c", script], env=paths(scripts), capture_output=True, text=True, check=False)
    assert done.stdout == "_engine_core\n_engine_core: function\n", done.stderr


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("engine-core se", {"serve"}),
        ("engine-core serve --dtype ", {"auto", "float32", "bfloat16"}),
        ("engine-core rm org/g", {"org/gguf:Q4_K_M", "org/gguf:Q8_0"}),
        ("engine-core serve --no-enable-pre", {"--no-enable-prefix-caching"}),
    ],
)
def test_fish_completes(scripts: Path, line: str, expected: set[str]) -> None:
    script = f"source {scripts}/fish; complete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], env=paths(scripts), capture_output=True, text=True, check=True
    )
    assert {each.split("\t")[0] for each in done.stdout.splitlines()} == expected
