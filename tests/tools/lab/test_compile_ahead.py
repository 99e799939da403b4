"""What a machine without a GPU prepares for one: the kernels of an engine's steps, and the items that are peers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.placed import PREFIX
from tests.triton_device import ON_GPU
from tools.lab.bench.gpu.peers import generate
from tools.lab.bench.gpu.report import count_kernels
from tools.lab.bench.tiny_model import write_tiny_model

pytestmark = pytest.mark.skipif(ON_GPU, reason="is about machines without one")
ROOT = Path(__file__).parents[3]
#: Of a model without experts, in bfloat16.
KERNELS = {
    *("gather", "prepare", "tables", "norm", "product", "rope", "prefill", "decode", "merge", "shared_prefix"),
    *("scan", "draw", "choose", "search"),
}


def test_every_kernel_of_a_models_steps_is_launched(tmp_path: Path) -> None:
    """It compiles each of them, which takes minutes: here it only names them."""
    write_tiny_model(tmp_path / "model")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", f"{PREFIX}tools.lab.bench.gpu.compile_ahead", str(tmp_path / "model"), "--names"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {f"{name}_kernel" for name in KERNELS}
    assert not (tmp_path / "cache").exists()


def test_compiled_kernels_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "none"))
    assert count_kernels() == 0
    for name in ("a/x.cubin", "a/x.ptx", "b/y.cubin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert count_kernels() == 2


def test_a_peer_generates_what_it_is_asked_for(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    found = generate(str(tmp_path), compiles=False, num_tokens=3)
    assert found["new_tokens"] == 3
    assert found["tokens_per_s"] > 0
