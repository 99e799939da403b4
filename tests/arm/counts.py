"""Counts the instructions of products on ARM64: what QEMU can say of speed.

usage: python -m tests.arm.counts [--folder FOLDER] WHAT [WHAT ...]

WHAT is a variant of the kernels, or a shared library for ARM64 that has llama.cpp's functions, such as the one in the
wheel of xllamacpp. Prints millions of instructions of a product with a matrix of 1,024 columns and 2,048 places, by
type and rows, on one thread. The quantization of x is counted too.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from kernels.cpu.build import SOURCE_FOLDER, VARIANTS
from tests.arm.system import COMPILER, ROOT, build_kernels, environment, kernels_of, prepared_system

_PLUGIN = Path(__file__).with_name("instructions.c")
_OUR_PRODUCTS = Path(__file__).with_name("our_products.c")
#: SVE has as many bytes as NEON, as on most CPUs; QEMU would give it 64.
_CPU = "max,sve-default-vector-length=16"
_PATIENCE_S = 3600


def count(command: list[str], settings: dict[str, str]) -> dict[str, int]:
    """Return the instructions of each product of a program, by its name."""
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=_PATIENCE_S)
    if done.returncode:
        raise SystemExit(f"{command}: status {done.returncode}\n{done.stderr[-2000:]}")
    marks = [int(line.split()[2]) for line in done.stderr.splitlines() if line.startswith("mark ")]
    found = [end - begin for begin, end in zip(marks[::2], marks[1::2], strict=True)]
    empty, *names = done.stdout.split("\n")[:-1]
    assert empty == "empty", empty
    return {name: number - found[0] for name, number in zip(names, found[1:], strict=True)}


def count_ours(folder: Path, plugin: Path, variant: str) -> dict[str, int]:
    """Return the instructions of a variant's products: by a program in C, since Python takes minutes."""
    program = folder / "our_products"
    command = [COMPILER, "-O1", "-std=gnu11", "-D_GNU_SOURCE", "-I", str(SOURCE_FOLDER), str(_OUR_PRODUCTS), "-ldl"]
    subprocess.run([*command, "-o", str(program)], check=True)
    emulator = ["qemu-aarch64", "-plugin", str(plugin), "-cpu", _CPU, "-L", str(folder / "root"), str(program)]
    return count([*emulator, str(kernels_of(folder, variant))], dict(os.environ))


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".arm")
    parser.add_argument("what", nargs="+")
    options = parser.parse_args(arguments)
    folder, python = prepared_system(options.folder)
    build_kernels(folder, [what for what in options.what if what in VARIANTS])
    plugin = folder / "instructions.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(_PLUGIN), "-o", str(plugin)], check=True)
    settings = {**environment(folder, _CPU), "ARM_PLUGIN": str(plugin)}
    for what in options.what:
        if what in VARIANTS:
            found = count_ours(folder, plugin, what)
        else:
            found = count([str(python), "-m", "tests.arm.products", what], settings)
        for name, number in found.items():
            print(f"{what.rpartition('/')[2]:24} {name:20} {number / 1e6:10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
