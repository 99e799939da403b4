"""Install torch for the tests: PyTorch's CPU build if pip would install a CUDA build on a machine without a GPU.

usage: python tools/lab/install_torch.py REQUIREMENT [PIP OPTION ...]

A CUDA build is a download of several gigabytes. pip is first asked what it would install. An --index-url among the
options is used unchanged. This runs before anything is installed, so it uses only the standard library, and it is
called by its path.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")


def has_nvidia_gpu() -> bool:
    """Return whether this machine seems to have an NVIDIA GPU."""
    return os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None


def names_an_index(arguments: Sequence[str]) -> bool:
    """Return whether the caller has chosen where torch comes from."""
    return any(word in ("-i", "--index-url") or word.startswith("--index-url=") for word in arguments)


def cuda_packages(report: dict[str, Any]) -> list[str]:
    """Return the packages in pip's installation report ("--report", version 1) that only an NVIDIA GPU needs."""
    names = (str(item["metadata"]["name"]).lower() for item in report["install"])
    return sorted(name for name in names if name.startswith(("nvidia-", "cuda-")))


def install(arguments: Sequence[str]) -> int:
    """Return pip's exit status; pip itself reports errors."""
    return subprocess.run([*_PIP, *arguments], check=False).returncode


def ask(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Return pip's exit status for resolving this without installing it, and its cuda_packages()."""
    resolved = subprocess.run([*_PIP, "--dry-run", "--report", "-", *arguments], stdout=subprocess.PIPE, check=False)
    return resolved.returncode, [] if resolved.returncode else cuda_packages(json.loads(resolved.stdout))


def install_cpu_build(arguments: Sequence[str], packages: Sequence[str]) -> int:
    """Install from PyTorch's CPU index instead of these CUDA packages; return the exit status."""
    from_cpu_index = [*arguments, "--index-url", CPU_INDEX]
    print(
        f"{arguments[0]} would be a CUDA build here, a download of several gigabytes\n"
        f"  ({', '.join(packages)}),\n"
        "and this machine has no NVIDIA GPU (no /dev/nvidia0, no nvidia-smi): installing the CPU build from\n"
        f"  {CPU_INDEX}",
        file=sys.stderr,
    )
    status, left = ask(from_cpu_index)
    if status == 0 and not left and install(from_cpu_index) == 0:
        return 0
    print(
        f"stopped: the CPU build could not be installed from {CPU_INDEX}.\nTo try again, there or at another "
        f"address:\n  make check TORCH={shlex.quote(' '.join(from_cpu_index))}\nTo install the CUDA build anyway:\n  "
        f"{shlex.join([sys.executable, '-m', 'pip', 'install', *arguments])} && make check",
        file=sys.stderr,
    )
    return 1


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 = torch is installed."""
    if not arguments:
        print(f"usage: {__doc__}", file=sys.stderr)
        return 2
    if has_nvidia_gpu() or names_an_index(arguments):
        return install(arguments)
    status, packages = ask(arguments)
    if status:
        return status
    return install_cpu_build(arguments, packages) if packages else install(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
