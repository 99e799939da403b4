"""Every file of examples/ runs as it stands. (The plug-in executor: tests/tools/test_plugin_package.py.)"""

import ast
import os
import re
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.core.models.idefics3_checkpoint import noise, write_checkpoint
from tests.user_programs import free_port, run, started

pytestmark = [pytest.mark.checkout, pytest.mark.timeout(300)]  # they are the checkout's files

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def lines_of(name: str, folder: Path, *arguments: str) -> list[str]:
    """Run an example and return the lines that it prints; a failed one fails the test with its last words."""
    path = EXAMPLES / name
    command = [sys.executable, str(path)] if path.suffix == ".py" else ["bash", str(path)]
    code, output, errors = run([*command, *arguments], folder)
    assert code == 0, errors[-2000:]
    return output.splitlines()


def test_a_batch(tmp_path: Path) -> None:
    lines = lines_of("offline_batch.py", tmp_path)
    assert [line.partition(" -> ")[0] for line in lines] == [
        "'The capital of France is'",
        "'Once upon a time'",
        "'One, two, three,'",
    ]
    assert "Paris" in lines[0]
    assert "six" not in lines[2]


def test_streams(tmp_path: Path) -> None:
    lines = lines_of("async_stream.py", tmp_path)
    assert len(lines) == 2
    assert all(line.endswith(".") and line.count(".") == 1 for line in lines)


def test_structured_outputs(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    person, mood = lines_of("structured_output.py", tmp_path)
    assert list(ast.literal_eval(person)) == ["name", "age"]
    assert mood in ("positive", "negative")


def test_an_adapter(tmp_path: Path) -> None:
    adapted, plain = lines_of("lora.py", tmp_path, str(tmp_path / "adapter"))
    assert adapted.partition(": ")[2] != plain.partition(": ")[2]
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_embeddings(tmp_path: Path) -> None:
    size, near, far = lines_of("embeddings.py", tmp_path)
    assert size == "numbers in a vector: 576"
    assert float(near.split()[0]) > float(far.split()[0])


def test_a_policy_gradient(tmp_path: Path) -> None:
    share, differing = lines_of("policy_gradient.py", tmp_path, "3")
    assert share.endswith("after 3 updates")
    assert differing == "0 of 576 log probabilities differed"


@pytest.mark.filterwarnings("ignore")  # of transformers, which makes the tiny model
def test_an_image(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    write_checkpoint(tmp_path / "model")
    image.fromarray(noise(60, 80, 1)).save(tmp_path / "photo.png")
    assert lines_of("images.py", tmp_path, str(tmp_path / "photo.png"), str(tmp_path / "model"))


def test_an_http_client(tmp_path: Path) -> None:
    pytest.importorskip("httptools")
    url = f"http://127.0.0.1:{free_port()}"
    with started(["engine-core", "serve", "--http", url.removeprefix("http://")], tmp_path / "server") as server:
        _wait_for(f"{url}/health")
        text = "\n".join(lines_of("http_client.py", tmp_path, url))
        server.terminate()  # killed with its engine, it would leave the socket's file behind
        assert server.wait(60) == 0
    assert "sky" in text


def test_a_router(tmp_path: Path) -> None:
    lines = lines_of("router.sh", tmp_path)
    assert sum(" open " in line for line in lines) == 2
    assert sum(line.startswith("=== ") for line in lines) == 2


def test_a_replay(tmp_path: Path) -> None:
    lines = lines_of("replay.sh", tmp_path)
    assert lines.count("  0 differences") == 3
    assert sum(line.startswith("what if ") for line in lines) == 2


def test_the_readme_names_each_file() -> None:
    named = set(re.findall(r"\]\(([\w.]+)/?\)", (EXAMPLES / "README.md").read_text()))
    assert named == {name for name in os.listdir(EXAMPLES) if name not in ("README.md", "__pycache__")}


def _wait_for(url: str) -> None:
    """Return when a URL answers; AssertionError after a minute."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")
