"""Every snippet of README.md runs as it stands, on the demo model: blocks marked `sh` and `python`."""

import re
import sys
from pathlib import Path

import pytest

from kernels.cpu.build import runnable_variants
from tests.user_programs import free_port, run

pytestmark = pytest.mark.checkout  # README.md

ROOT = Path(__file__).resolve().parent.parent


def snippets() -> list[tuple[str, str]]:
    """Return (language, text) of each block that is to run."""
    return re.findall(r"(?ms)^```(sh|python)\n(.*?)^```", (ROOT / "README.md").read_text())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("index", range(5))
def test_a_snippet_runs_as_it_stands(index: int, tmp_path: Path) -> None:
    language, text = snippets()[index]
    text = text.replace("/tmp/", f"{tmp_path}/").replace(":8000", f":{free_port()}")
    command = ["bash", "-eu", "-c", text] if language == "sh" else [sys.executable, "-c", text]
    code, output, errors = run(command, tmp_path)
    assert code == 0, errors[-2000:]
    assert output.strip(), errors[-2000:]


def test_there_are_as_many_as_are_run() -> None:
    assert [language for language, _ in snippets()] == ["sh", "sh", "python", "sh", "sh"]


def test_the_sample_of_make_run_is_what_it_prints(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    variant = re.findall(r"kernels `(\w+)`\):\n\n```text", text)[0]
    if variant not in runnable_variants():
        pytest.skip(f"the sample is of the kernels {variant}, which this CPU does not run")
    sample = re.findall(r"(?m)^(\d)  +[\d.]+  +[\d.]+  +(\d+)  +(\d+)  +(\d+)  (\w+)$", text)
    with (tmp_path / "nothing").open("w+") as nothing:
        command = ["engine-core", "generate", "--cpu-kernels", variant]
        code, _, errors = run(command, tmp_path, stdin=nothing.fileno())
    assert code == 0, errors[-2000:]
    rows = [line.strip("│").split("│") for line in errors.splitlines() if line.startswith("│")]
    printed = [tuple(cell.strip() for cell in (row[0], *row[3:])) for row in rows if len(row) == 7]
    assert printed == sample
    assert len(sample) == 5
