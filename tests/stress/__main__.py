"""The suite again and again on a busy machine, for tests that depend on time: `make stress`.

usage: python -m tests.stress [--runs N] [--burn N] [--folder FOLDER] [PYTEST ARGUMENT ...]

Next to each run, `burn` processes compute without end. What fails is not run again. Each run adds a line to
FOLDER/runs.jsonl, and one that fails leaves what it printed next to that file. Then the file is summarized, with the
runs of earlier calls; without runs it is only summarized. The status is 1 if a run of this call has failed.
"""

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ipc.log_lines import counted
from tools.lab.bench.__main__ import cpu_name

ROOT = Path(__file__).resolve().parents[2]
_BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
_NONE = {"passed": 0, "failed": [], "slowest": ["", 0.0]}  # pytest has not begun
#: One run: a line of the file.
Run = dict[str, Any]


@contextlib.contextmanager
def burning(num_processes: int) -> Iterator[None]:
    """Keep so many cores busy. The processes end with this one, however it ends."""
    processes = [subprocess.Popen([sys.executable, "-c", _BURN]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def commit() -> str:
    """Return the checkout's commit, with a + if files differ from it."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def run(arguments: list[str], burn: int, folder: Path) -> Run:
    """Run the tests once, and keep what pytest printed if it fails."""
    began, start, of = datetime.datetime.now(datetime.UTC), time.monotonic(), commit()
    said = folder / f"{began:%Y%m%d-%H%M%S-%f}.txt"
    with tempfile.TemporaryDirectory(prefix="ec-stress-") as temporary, said.open("w") as output:
        counts_file = Path(temporary, "counts.json")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.stress.counted", "--counted", str(counts_file)]
        with burning(burn):
            status = subprocess.run(
                [*command, *arguments], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False
            ).returncode
            load = os.getloadavg()[0]
        counts = json.loads(counts_file.read_text()) if counts_file.exists() else _NONE
    if status == 0:
        said.unlink()
    about = {"began": f"{began:%Y-%m-%dT%H:%M:%SZ}", "commit": of, "cpu": cpu_name(), "cores": os.cpu_count()}
    took = {"seconds": round(time.monotonic() - start), "load": round(load, 1)}
    return {**about, "arguments": arguments, "burn": burn, "status": status, **counts, **took}


def summary(runs: list[Run]) -> str:
    """Return a text: how often which tests ran, and each test that has failed, with the commits."""
    lines = []
    groups = defaultdict[tuple[Any, ...], list[Run]](list)
    for each in runs:
        groups[" ".join(each["arguments"]), each["burn"], each["cpu"], each["cores"]].append(each)
    for (arguments, burn, cpu, cores), group in groups.items():
        failed = sum(each["status"] != 0 for each in group)
        hours = sum(each["seconds"] for each in group) / 3600
        loads = [each["load"] for each in group]
        lines += [
            f"{counted(len(group), 'run')} of {arguments}",
            f"    {failed} failed; {sum(each['passed'] for each in group)} tests passed in {hours:.2f} hours",
            f"    burn {burn}, load {min(loads)} to {max(loads)}, {cores} cores of {cpu}",
        ]
    failures = Counter(name for each in runs for name in each["failed"])
    for name, count in failures.most_common():
        commits = dict.fromkeys(each["commit"] for each in runs if name in each["failed"])
        lines.append(f"failed {count}: {name} ({', '.join(commits)})")
    for each in runs:
        if each["status"] != 0 and not each["failed"]:
            lines.append(f"status {each['status']}, no test failed: {each['began']} ({each['commit']})")
    slowest = max((each["slowest"] for each in runs), key=lambda pair: pair[1], default=["", 0.0])
    if slowest[0]:
        lines.append(f"slowest: {slowest[1]} s, {slowest[0]}")
    return "\n".join(lines) or "no runs yet"


def main(arguments: list[str]) -> int:
    """Return the exit status: 1 = a run of this call has failed."""
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].splitlines()[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--burn", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=ROOT / ".stress")
    options, pytest_arguments = parser.parse_known_args(arguments)
    options.folder.mkdir(exist_ok=True)
    file: Path = options.folder / "runs.jsonl"
    status = 0
    for _ in range(options.runs):
        done = run(pytest_arguments or ["tests"], options.burn, options.folder)
        with file.open("a") as lines:
            lines.write(json.dumps(done) + "\n")
        status |= done["status"] != 0
        print(
            f"{done['passed']} passed, {len(done['failed'])} failed, {done['seconds']} s", *done["failed"], flush=True
        )
    print(summary([json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
