"""device=cuda on a machine that lacks something for it: an error that says what to install."""

import os
import sys
from pathlib import Path

import pytest
import torch

from core.device import cuda_device
from engine_core import LLM
from ipc.errors import ConfigError

NO_CUDA = r"is built without CUDA \(pip install .* torch==.*\)"
NO_TRITON = r"needs triton, which is not installed: pip install triton, or engine-core with its extra \[cuda\]"


def test_a_missing_device_is_refused_with_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.triton import device

    monkeypatch.setattr(device, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=f"needs an NVIDIA GPU: .* {NO_CUDA}; use device=cpu"):
        cuda_device()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"finds no device and driver; use device=cpu without one"):
        cuda_device()
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=NO_TRITON):
        cuda_device()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.modules['triton'] = None", NO_TRITON),
        ("import torch; torch.version.cuda = None", NO_CUDA),
    ],
)
def test_an_engine_without_triton_or_a_cuda_build_says_what_to_install(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine process imports a module of this name before everything else."""
    (tmp_path / "sitecustomize.py").write_text(code + "\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("ENGINE_CORE_TESTS_EXEC", "1")  # a forked child would have the modules of its parent
    with pytest.raises(ConfigError, match=f"^device=cuda .*{reason}"):
        LLM(device="cuda")
