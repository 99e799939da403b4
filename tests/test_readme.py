"""Every snippet of README.md runs as it stands, on the demo model: blocks marked `sh` and `python`."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from core.model_files.model_config import read_model_config
from ipc.files.model_files import resolve_model
from tests.core.adapters.peft_files import matrix_shapes, random_matrices, write_peft
from tests.core.models.idefics3_checkpoint import noise, write_checkpoint

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.checkout  # README.md

ROOT = Path(__file__).resolve().parent.parent


def snippets() -> list[tuple[str, str]]:
    """Return (language, text) of each block that is to run."""
    return re.findall(r"(?ms)^```(sh|python)\n(.*?)^```", (ROOT / "README.md").read_text())


def run(command: list[str], folder: Path) -> tuple[int, str, str]:
    """Run a command with the environment's programs on its path -> (exit code, stdout, stderr). Nothing outlives it."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    with (folder / "stdout").open("w+") as output, (folder / "stderr").open("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=280)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return code, (folder / "stdout").read_text(), (folder / "stderr").read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_cached_model(folder: Path) -> None:
    """Write a tiny model with images where the Hub's cache would have the one that the snippet names."""
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    write_checkpoint(snapshot)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("index", range(10))
@pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
def test_a_snippet_runs_as_it_stands(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    language, text = snippets()[index]
    if "LoRARequest" in text:
        shapes = matrix_shapes(read_model_config(resolve_model(None)))
        write_peft(tmp_path / "sql-lora", random_matrices(shapes, 2, 1, ("q_proj",)), rank=2, alpha=4)
    if "photo.png" in text:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        write_cached_model(tmp_path / "hub" / "models--HuggingFaceTB--SmolVLM-256M-Instruct")
        Image.fromarray(noise(60, 80, 1)).save(tmp_path / "photo.png")
    text = text.replace("/tmp/", f"{tmp_path}/").replace(":8000", f":{free_port()}")
    command = ["bash", "-eu", "-c", text] if language == "sh" else [sys.executable, "-c", text]
    code, output, errors = run(command, tmp_path)
    assert code == 0, errors[-2000:]
    assert output.strip(), errors[-2000:]


def test_there_are_as_many_as_are_run() -> None:
    assert [language for language, _ in snippets()] == ["sh", "sh", *["python"] * 5, *["sh"] * 3]
