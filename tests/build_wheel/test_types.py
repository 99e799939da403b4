"""A user's `mypy --strict` over `from engine_core import ...`: against the wheel, and against an editable install."""

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.build_wheel.suite import ROOT, environment, install

pytestmark = [pytest.mark.checkout, pytest.mark.timeout(400)]  # the wheel's kernels are compiled

WHATS = ("wheel", "editable")

#: An unused "type: ignore" is an error under --strict: each marked line must be one that mypy refuses.
PROGRAM = """
from typing import assert_type

import engine_core
from engine_core import LLM, AsyncLLM, ConfigError, RequestOutput, SamplingParams, __version__
from engine_core import Nothing  # type: ignore[attr-defined]


def answer(llm: LLM) -> list[str]:
    outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=3))
    assert_type(outputs, list[RequestOutput])
    return [output.outputs[0].text for output in outputs]


async def stream(llm: AsyncLLM) -> None:
    async for output in llm.generate("a", SamplingParams()):
        assert_type(output, RequestOutput)


assert_type(__version__, str)
assert_type(engine_core.LLM(model="m").chat([{"role": "user", "content": "a"}]), list[engine_core.RequestOutput])
LLM(model=3)  # type: ignore[arg-type]
SamplingParams(max_tokens="3")  # type: ignore[arg-type]
raise ConfigError("x")
"""


@pytest.fixture
def cache(what: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The folder in which mypy keeps what it knows: of an earlier run, or at first what it knows from the other test,
    which imports the same packages."""
    kept = getattr(request.config, "cache", None)  # there is none with -p no:cacheprovider
    if kept is None:
        yield tmp_path / "mypy"
        return
    own, *others = (kept.mkdir(f"mypy-{name}") for name in (what, *WHATS))
    with open(own.parent / "mypy.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for other in others:
            if not any(own.iterdir()):
                shutil.copytree(other, own, dirs_exist_ok=True)
        yield own


@pytest.mark.parametrize("what", WHATS)
def test_a_users_program_is_checked(what: str, installed: Path, cache: Path, tmp_path: Path) -> None:
    """What an earlier run has checked of the dependencies, and of files that are as they were, is not checked again."""
    programs = installed if what == "wheel" else install(tmp_path / "venv", "--editable", str(ROOT))
    (tmp_path / "program.py").write_text(PROGRAM)
    options = ["--strict", "--config-file=", "--cache-dir", str(cache), "--python-executable", str(programs / "python")]
    command = [sys.executable, "-m", "mypy", *options, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
