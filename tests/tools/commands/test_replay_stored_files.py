"""Captures of each released format: they are read, replayed and redacted."""

from pathlib import Path

import pytest

from core.capture.file import CaptureFile
from core.capture.records import FORMAT_MAJOR, FORMAT_MINOR
from tests.captures import replay
from tools.cli import main

FOLDER = Path(__file__).parents[2] / "data" / "captures"
#: By minor version. The same five requests on three rows and nine blocks, so some are preempted.
FILES = {int(path.stem.split("_")[1]): path for path in FOLDER.glob(f"{FORMAT_MAJOR}_*.cap")}


def test_there_is_a_file_of_every_format() -> None:
    assert sorted(FILES) == list(range(FORMAT_MINOR + 1))
    for minor, path in FILES.items():
        assert CaptureFile(path).header.minor == minor


@pytest.mark.parametrize("minor", sorted(FILES))
def test_a_stored_file_replays(minor: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for mode in ("resched", "full"):
        status, report = replay(capfd, FILES[minor], "--mode", mode)
        run = report["run"]
        assert (status, run["difference"]) == (0, None), mode
        assert (run["num_requests"], run["num_tokens"], run["num_preemptions"]) == (5, 60, 2)
    assert main(["replay", "redact", str(FILES[minor]), str(tmp_path / "redacted.cap")]) == 0
    assert main(["replay", str(tmp_path / "redacted.cap")]) == 0
    assert main(["replay", str(FILES[minor]), "--what-if", "max_num_seqs=2"]) == 0
    assert main(["replay", str(FILES[minor]), "--fails-when", "preemptions > 1"]) == 1
    capfd.readouterr()
