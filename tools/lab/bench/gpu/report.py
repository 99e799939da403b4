"""Everything worth measuring on a GPU that is there for minutes: items in order of worth, each with an estimate.

usage: python -m tools.lab.bench.gpu.report FOLDER [--seconds S] [--carried FILE]

Each record is one JSON line in FOLDER/gpu.jsonl, written and flushed when its item ends. An item of which FILE or an
earlier run in FOLDER has a record is skipped, and so is one whose estimate does not fit the time left. So a run that is
killed loses one item, and the next one goes on after it. An item that fails leaves a record with its error.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ipc.version import VERSION

_Record = dict[str, Any]
_TESTS = "tests/kernels/triton"
#: What a GPU's functions, products and tokens must be, bit for bit.
_GOLDENS = (
    *(f"{_TESTS}/test_{name}.py" for name in ("arithmetic", "demo_products")),
    "tests/core/executors/test_cuda_demo_tokens.py",
)
#: Digests of probe() by devices whose tensor cores add so many neighbours of K: from an emulation, not from a device.
EMULATED = {"16 neighbours": 1791642891, "8 neighbours": 210937439}
#: The same of products of 8-bit floats, by the architectures whose tensor cores have such bits.
EMULATED_FP8 = {"Hopper": 1611383877, "Ada": 77119175, "Blackwell": 3361556702}


class Item(NamedTuple):
    """One thing to measure."""

    name: str
    seconds: float  # estimate
    priority: int  # lower ones run first
    run: Callable[[], _Record]


class Report:
    """The records of a folder, of which each item has one."""

    def __init__(self, folder: Path, version: str, carried: Path | None = None) -> None:
        """version: what is measured; records of another one do not count. carried: records of an earlier machine."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._version = folder / "gpu.jsonl", version
        self.known = {one["item"] for path in (self._path, carried) for one in _records(path) if self._counts(one)}

    def run(self, items: Sequence[Item], seconds: float, clock: Callable[[], float] = time.monotonic) -> list[str]:
        """Run the items that are not known and fit the time; return the names of the others that are left."""
        until, left = clock() + seconds, list[str]()
        for item in sorted(items, key=lambda item: item.priority):
            if item.name in self.known:
                continue
            if clock() + item.seconds > until:
                left.append(item.name)
                continue
            begin = clock()
            try:
                record = item.run()
            except Exception as error:  # the next items may work
                record = {"error": f"{type(error).__name__}: {error}"}
            self._write({"item": item.name, "version": self._version, "took_s": round(clock() - begin, 2), **record})
        return left

    def _counts(self, record: _Record) -> bool:
        return record.get("version") == self._version and "error" not in record

    def _write(self, record: _Record) -> None:
        """Append a line. The end of a line that an earlier run was killed in stays unread."""
        with self._path.open("ab") as file:
            is_torn = file.tell() > 0 and not self._path.read_bytes().endswith(b"\n")
            file.write(b"\n" * is_torn + json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.known.add(record["item"])


def _records(path: Path | None) -> Iterator[_Record]:
    """Yield the whole records of a file."""
    if path is None or not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "item" in record:
            yield record


# --- the items --------------------------------------------------------------------------------------------------------


def probe() -> _Record:
    """Return the digest of products by each shape of tiles, of numbers whose sums depend on their order."""
    from core.device import cuda_device
    from kernels.triton.device import has_fp8
    from kernels.triton.self_test import fp8_tile_digests, tile_digests

    device, found = cuda_device(), dict[str, Any]()
    fp8 = fp8_tile_digests(device) if has_fp8(device) else []
    for prefix, digests, emulated in (("", tile_digests(device), EMULATED), ("fp8_", fp8, EMULATED_FP8)):
        known = {digest: name for name, digest in emulated.items()}
        names = sorted({known.get(digest, "another") for digest in digests})
        found |= {f"{prefix}digests": digests, f"{prefix}as": names}
    return found


def kernels(name: str) -> _Record:
    """Return the times of the cases of `bench kernels` whose names begin so."""
    from ipc.options.config import EngineConfig
    from tools.lab.bench.gpu.gpu_kernels import measure_gpu_kernels

    return {"cases": list(measure_gpu_kernels(EngineConfig(device="cuda"), 0, name=name))}


def latency(*options: str) -> _Record:
    """Return what `bench latency` writes."""
    arguments = ["bench", "latency", "--device", "cuda", *options]
    done = subprocess.run(
        [sys.executable, "-m", "engine_core", *arguments], capture_output=True, text=True, timeout=400
    )
    return {"status": done.returncode, "out": done.stdout[-8000:], "err": done.stderr[-2000:]}


def several() -> _Record:
    """Return what `bench latency` writes with two GPUs, each with a part of the model."""
    import torch

    if torch.cuda.device_count() < 2:
        return {"skipped": "the machine has one GPU"}
    return latency("--tensor-parallel-size", "2")


def checks(*arguments: str) -> _Record:
    """Return how tests end that compare this GPU's bits: with goldens, and of two ways to the same numbers."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    return {"status": done.returncode, "out": done.stdout[-8000:], "err": done.stderr[-2000:]}


def peer(name: str) -> _Record:
    """Return what else the machine has for the same work (peers.py)."""
    from tools.lab.bench.gpu import peers

    found: _Record = peers.scaled_products() if name == "fp8" else peers.generate(None, compiles=name == "compiled")
    return found


def items() -> list[Item]:
    """Return all items, with estimates that no device has confirmed.

    Each record says how many kernels it compiled: none, if the cache of compile_ahead.py was carried.
    """
    return [item._replace(run=partial(_counting, item.run)) for item in _items()]


def _counting(run: Callable[[], _Record]) -> _Record:
    before = count_kernels()
    record = run()
    return {**record, "compiled": count_kernels() - before}


def count_kernels() -> int:
    """Return how many compiled kernels are in Triton's cache."""
    folder = os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache"
    return sum(1 for _ in Path(folder).expanduser().glob("*/*.cubin"))


def _items() -> list[Item]:
    return [
        Item("probe", 30, 0, probe),
        Item("latency at L2", 60, 1, latency),
        Item("goldens of the demo model", 40, 1, partial(checks, *_GOLDENS)),
        Item("ends of products", 20, 2, partial(checks, f"{_TESTS}/test_ordered_product.py", "-k", "activation")),
        Item("latency at L0", 60, 3, partial(latency, "--numerics", "L0")),
        Item("latency without graphs", 60, 5, partial(latency, "--enforce-eager")),
        Item("two GPUs", 60, 4, several),
        *(Item(name, 20, 2, partial(kernels, name)) for name in ("product ordered", "product gated", "attention")),
        Item("product fp8", 15, 3, partial(kernels, "product fp8")),
        *(Item(name, 15, 4, partial(kernels, name)) for name in ("product int8", "product Q4", "routed", "sampler")),
        Item("peer: transformers compiled", 60, 6, partial(peer, "compiled")),
        Item("peer: transformers", 30, 7, partial(peer, "plain")),
        Item("peer: products of FP8", 20, 7, partial(peer, "fp8")),
    ]


def _version() -> str:
    """Return what is measured: this tree and the compilers."""
    import torch
    import triton

    tree = subprocess.run(
        ["git", "rev-parse", "HEAD^{tree}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"{VERSION} {tree or 'no tree'} torch={torch.__version__} triton={triton.__version__}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where gpu.jsonl is")
    parser.add_argument("--seconds", type=float, default=480, help="time for all items")
    parser.add_argument("--carried", type=Path, help="gpu.jsonl of an earlier machine")
    given = parser.parse_args(arguments)
    report = Report(given.folder, _version(), given.carried)
    for name in report.run(items(), given.seconds):
        print(f"no time for: {name}")


if __name__ == "__main__":
    main()
