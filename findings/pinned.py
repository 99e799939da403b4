"""What every finding does: install pinned packages into a temporary folder, run a program, compare what it prints."""

import os
import subprocess
import sys
import tempfile


def check(packages: list[str], program: str, expected: dict[str, str]) -> None:
    """Run a program with these packages alone, and end this process: 0 as expected, 1 changed, 2 not installed.

    packages: requirements with exact versions. program: Python source that prints lines "name: value".
    expected: the values that were seen.
    """
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", folder]
        if subprocess.run([*pip, *packages], check=False).returncode:
            sys.exit(2)
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-s", "-c", program]
        ran = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    seen = dict(line.split(": ", 1) for line in ran.stdout.splitlines() if ": " in line)
    changed = ran.returncode != 0
    for name, value in expected.items():
        is_same = seen.get(name) == value
        changed |= not is_same
        print(
            f"{'as seen' if is_same else 'CHANGED'}  {name}: {seen.get(name)}" + ("" if is_same else f" (was {value})")
        )
    sys.exit(changed)
