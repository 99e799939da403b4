"""Stop `make venv` before pip downloads a CUDA build of torch, several gigabytes, for a machine without an NVIDIA GPU.

usage: python tools/check_torch.py REQUIREMENT [PIP OPTION ...]
Exit status: 1 if pip would install a CUDA build; pip's own if pip fails; else 0.

It runs before anything is installed: standard library only, and called by its path. It asks pip what it would install.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from typing import Any


def has_nvidia_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU: /dev/nvidia0 or nvidia-smi exists."""
    return os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None


def cuda_packages(report: dict[str, Any]) -> list[str]:
    """Return the packages of pip's installation report ("--report", version 1) that only an NVIDIA GPU needs."""
    names = (str(item["metadata"]["name"]).lower() for item in report["install"])
    return sorted(name for name in names if name.startswith(("nvidia-", "cuda-")))


def explain(requirement: str, packages: Iterable[str]) -> str:
    """Return the message for a requirement that would install these CUDA packages."""
    listed = ", ".join(packages)
    return (
        f"stopped: {requirement} would be a CUDA build here, a download of several gigabytes\n"
        f"  ({listed}),\n"
        "and this machine has no NVIDIA GPU (no /dev/nvidia0, no nvidia-smi).\n"
        "The CPU build is on PyTorch's CPU wheel index, whose address pytorch.org shows ('Get Started', CPU):\n"
        f"  make run TORCH='{requirement} --index-url ADDRESS'"
    )


def main(arguments: list[str]) -> int:
    """Check what pip would install for these arguments, and return the exit status."""
    if has_nvidia_gpu():
        return 0
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *arguments]
    resolved = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if resolved.returncode:
        return resolved.returncode  # pip has printed the reason
    packages = cuda_packages(json.loads(resolved.stdout))
    if not packages:
        return 0
    requirement = next((word for word in arguments if word.startswith("torch")), "torch")
    print(explain(requirement, packages), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
