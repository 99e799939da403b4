"""The check that runs before torch is installed."""

import json
import subprocess
from typing import Any

import pytest

from tools import check_torch


def report(*names: str) -> dict[str, Any]:
    return {"version": "1", "install": [{"metadata": {"name": name, "version": "1"}} for name in names]}


class FakePip:
    """Stands in for subprocess.run: what pip would print."""

    def __init__(self, *names: str, returncode: int = 0) -> None:
        self.output = json.dumps(report(*names)).encode()
        self.returncode = returncode
        self.command: list[str] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        self.command = command
        return subprocess.CompletedProcess(command, self.returncode, self.output)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_torch, "has_nvidia_gpu", lambda: False)


def test_packages_of_a_cuda_build_are_found() -> None:
    assert check_torch.cuda_packages(report("torch", "NVIDIA-cublas", "triton", "cuda-bindings", "sympy")) == [
        "cuda-bindings",
        "nvidia-cublas",
    ]
    assert check_torch.cuda_packages(report("torch", "filelock")) == []


@pytest.mark.usefixtures("without_gpu")
def test_a_cuda_build_without_a_gpu_stops(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pip = FakePip("torch", "nvidia-cudnn-cu13")
    monkeypatch.setattr(subprocess, "run", pip)
    assert check_torch.main(["torch==2.13.0", "--pre"]) == 1
    assert pip.command[-2:] == ["torch==2.13.0", "--pre"]
    assert "--dry-run" in pip.command
    error = capsys.readouterr().err
    assert "nvidia-cudnn-cu13" in error
    assert "make run TORCH='torch==2.13.0 --index-url ADDRESS'" in error


@pytest.mark.usefixtures("without_gpu")
def test_a_cpu_build_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip("torch"))
    assert check_torch.main(["torch==2.13.0"]) == 0


@pytest.mark.usefixtures("without_gpu")
def test_pip_that_fails_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip(returncode=7))
    assert check_torch.main(["torch==0"]) == 7


def test_with_a_gpu_pip_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_torch, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(subprocess, "run", FakePip(returncode=7))
    assert check_torch.main(["torch==2.13.0"]) == 0
