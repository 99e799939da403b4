"""How torch is installed, with a pip that only says what it was asked."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.lab import install_torch

CUDA = ("torch", "NVIDIA-cudnn-cu13", "triton", "cuda-bindings")
CPU = ["--index-url", install_torch.CPU_INDEX]
TORCH = ["torch==2.13.0", "--pre"]


def report(*names: str) -> dict[str, Any]:
    return {"version": "1", "install": [{"metadata": {"name": name, "version": "1"}} for name in names]}


class FakePip:
    """Stands in for subprocess.run: what pip would print and return, for PyTorch's CPU index and for all others."""

    def __init__(self, *names: str, fails: str = "", cpu: tuple[str, ...] = ("torch",)) -> None:
        self.names, self.cpu, self.fails = names, cpu, fails
        self.resolved: list[list[str]] = []
        self.installed: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        assert command[:3] == [sys.executable, "-m", "pip"]
        is_cpu, is_dry = command[-2:] == CPU, "--dry-run" in command
        (self.resolved if is_dry else self.installed).append(command[command.index("torch==2.13.0") :])
        moment = f"{'resolve' if is_dry else 'install'} {'cpu' if is_cpu else 'default'}"
        output = json.dumps(report(*(self.cpu if is_cpu else self.names))).encode()
        return subprocess.CompletedProcess(command, 7 if moment == self.fails else 0, output)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_torch, "has_nvidia_gpu", lambda: False)


def test_packages_of_a_cuda_build_are_found() -> None:
    assert install_torch.cuda_packages(report(*CUDA, "sympy")) == ["cuda-bindings", "nvidia-cudnn-cu13"]
    assert install_torch.cuda_packages(report("torch", "filelock")) == []


def test_a_cpu_build_is_installed_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip("torch")
    monkeypatch.setattr(subprocess, "run", pip)
    assert install_torch.main(TORCH) == 0
    assert (pip.resolved, pip.installed) == ([TORCH], [TORCH])


def test_in_place_of_a_cuda_build_the_cpu_build_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = FakePip(*CUDA)
    monkeypatch.setattr(subprocess, "run", pip)
    assert install_torch.main(TORCH) == 0
    assert (pip.resolved, pip.installed) == ([TORCH, TORCH + CPU], [TORCH + CPU])
    said = capsys.readouterr().err
    assert "(cuda-bindings, nvidia-cudnn-cu13)" in said
    assert install_torch.CPU_INDEX in said
    assert "stopped" not in said


@pytest.mark.parametrize("pip", [FakePip(*CUDA, fails="resolve cpu"), FakePip(*CUDA, fails="install cpu")])
def test_a_cpu_build_that_cannot_be_had_stops_with_the_command_to_type(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", pip)
    assert install_torch.main(TORCH) == 1
    assert pip.installed in ([], [TORCH + CPU])
    said = capsys.readouterr().err
    assert f"\n  make check TORCH='torch==2.13.0 --pre --index-url {install_torch.CPU_INDEX}'\n" in said
    assert f"\n  {sys.executable} -m pip install torch==2.13.0 --pre && make check\n" in said


def test_a_cuda_build_on_the_cpu_index_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of pip's configuration may have one too."""
    pip = FakePip(*CUDA, cpu=CUDA)
    monkeypatch.setattr(subprocess, "run", pip)
    assert install_torch.main(TORCH) == 1
    assert pip.installed == []


@pytest.mark.parametrize("index", [["-i", "x"], ["--index-url", "x"], ["--index-url=x"]])
def test_an_index_that_the_caller_names_is_taken(index: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(*CUDA)
    monkeypatch.setattr(subprocess, "run", pip)
    assert install_torch.main([*TORCH, *index]) == 0
    assert (pip.resolved, pip.installed) == ([], [[*TORCH, *index]])


def test_with_a_gpu_pip_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(*CUDA)
    monkeypatch.setattr(install_torch, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(subprocess, "run", pip)
    assert install_torch.main(TORCH) == 0
    assert (pip.resolved, pip.installed) == ([], [TORCH])


@pytest.mark.parametrize("moment", ["resolve default", "install default"])
def test_pip_that_fails_is_handed_on(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip("torch", fails=moment))
    assert install_torch.main(TORCH) == 7


@pytest.mark.checkout  # the Makefile
def test_torch_is_installed_for_the_tests_and_not_to_run(tmp_path: Path) -> None:
    """A fake Python notes what it is asked to run."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/commands\n')
    python.chmod(0o755)
    root = Path(__file__).resolve().parents[3]
    places = f"PYTHON={python}", f"BIN={tmp_path}", f"VENV={tmp_path}", "TORCH=torch==1 -x"
    for goal, expected in (("venv", []), ("check", ["tools/lab/install_torch.py torch==1 -x"])):
        words = ["make", "--silent", goal, *places]
        subprocess.run(words, cwd=root, env={**os.environ, "MAKEFLAGS": ""}, check=False, capture_output=True)
        commands = (tmp_path / "commands").read_text().splitlines()
        assert [line for line in commands if "torch==" in line] == expected
