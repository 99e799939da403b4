"""Every Triton kernel compiles to machine code for a Hopper GPU; the interpreter would let pass what does not."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_kernel_compiles_for_a_device(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.kernels.compile_triton"]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    launched = set()
    for path in (ROOT / "kernels" / "triton").glob("*.py"):
        launched |= set(re.findall(r"(?m)^ +(_\w+)\[", path.read_text()))
    assert set(result.stdout.split()) == launched
