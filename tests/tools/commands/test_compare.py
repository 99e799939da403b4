"""`replay --compare`: another checkout in which one line differs is told from this one at that line's first effect."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from tests.captures import CONFIG, capture_in_process
from tests.placed import PREFIX
from tools.cli import main

ROOT = Path(__file__).resolve().parents[3]
TIGHT = msgspec.structs.replace(CONFIG, num_blocks_override=18)


def other_tree(folder: Path, old: str, new: str) -> Path:
    """A checkout whose victims are chosen otherwise; all but `core` is this one's."""
    folder.mkdir()
    shutil.copytree(ROOT / "core", folder / "core", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("ipc", "frontend", "kernels", "tools", "engine_core"):
        (folder / name).symlink_to(ROOT / name)
    path = folder / "core" / "scheduling" / "preemption.py"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return folder


@pytest.mark.checkout  # it copies core/
def test_the_first_effect_of_a_line_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.cap"
    capture_in_process(source, TIGHT)
    other = other_tree(tmp_path / "other", "return candidates[order]", "return candidates[order][::-1]")
    assert main(["replay", str(source), "--compare", str(other), "--json"]) == 3
    comparison = json.loads(capsys.readouterr().out)
    difference = comparison["difference"]
    assert comparison["is_own"]
    assert difference["kind"] == "decision"
    assert any("row preempted" in line for line in difference["details"]), "another row is preempted"
    assert main(["replay", str(source), "--compare", str(ROOT)]) == 0
    assert "makes the same decisions" in capsys.readouterr().out


@pytest.mark.soak
def test_a_capture_of_the_other_version_is_run_anew_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was written by a version that decides as neither does."""
    source = tmp_path / "a.cap"
    with monkeypatch.context() as patch:
        patch.setattr(
            f"{PREFIX}core.scheduling.preemption.Preemption.victims_first", lambda self, candidates: candidates
        )
        patch.setattr(f"{PREFIX}core.scheduling.admission.ceil_div", lambda value, by: -(-value // by) + 1)
        capture_in_process(source, TIGHT)
    other = other_tree(tmp_path / "other", "return candidates[order]", "return candidates[order][::-1]")
    assert main(["replay", str(source), "--compare", str(other)]) == 3
    out = capsys.readouterr().out
    assert "its requests run again here" in out
    assert "first decides differently in step" in out


def test_what_is_no_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.cap"
    capture_in_process(source)
    assert main(["replay", str(source), "--compare", str(tmp_path)]) == 1
    assert "neither a checkout" in capsys.readouterr().err
    false = shutil.which("false")
    assert false is not None
    assert main(["replay", str(source), "--compare", false]) == 4
    assert "cannot replay" in capsys.readouterr().err
