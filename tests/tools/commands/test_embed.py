"""`engine-core embed`: texts with images and system messages, one vector a line; and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc.files.model_files import resolve_model
from tests.core.models import embedding_gemma2_checkpoint as gemma
from tests.core.models import qwen3_vl_embedding_checkpoint as qwen
from tests.core.models.idefics3_checkpoint import noise
from tests.frontend.http.caller import Caller, serving
from tools.cli import main

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

IMAGES = [noise(40, 60, 1), noise(33, 25, 2)]
SMALL = ("--dtype", "float32", "--threads", "1")
MARK = "<|image|>"  # of EmbeddingGemma 2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The images as files."""
    folder, names = tmp_path_factory.mktemp("images"), []
    for number, image in enumerate(IMAGES):
        names.append(str(folder / f"{number}.png"))
        Image.fromarray(image).save(names[-1])
    return names


@pytest.fixture(scope="module")
def of_gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    folder = gemma.write_checkpoint(tmp_path_factory.mktemp("embedding_gemma2"))
    with serving("-m", str(folder), *SMALL, "--limit-mm-per-prompt", "image=2") as caller:
        yield caller


@pytest.fixture(scope="module")
def of_qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    folder = qwen.write_checkpoint(tmp_path_factory.mktemp("qwen3_vl_embedding"))
    with serving("-m", str(folder), *SMALL) as caller:
        yield caller


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["embed", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def images(*names: str) -> list[str]:
    return [word for name in names for word in ("--image", name)]


def test_texts_with_images(of_gemma: Caller, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each text follows the images; the model's prompt is before both, as over HTTP."""
    words = ["A cat", "Two dogs", *images(*files), "--connect", of_gemma.connect]
    for name, more in (("", []), ("query", ["--prompt-name", "query"])):
        found = lines(capsys, *words, *more)
        assert [(one["text"], one["images"]) for one in found] == [("A cat", files), ("Two dogs", files)]
        for one in found:
            text = gemma.PROMPTS.get(name, "") + MARK * 2 + one["text"]
            np.testing.assert_allclose(one["embedding"], gemma.their_vector(text, IMAGES), atol=1e-5)
            assert one["num_tokens"] == len(gemma.their_states(text, IMAGES)[0])


def test_an_image_alone(of_gemma: Caller, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = lines(capsys, *images(files[1]), "--connect", of_gemma.connect, "--dimensions", "9")
    assert (one["text"], one["images"], len(one["embedding"])) == ("", files[1:], 9)
    assert one["num_tokens"] == len(gemma.their_states(MARK, IMAGES[1:])[0])


def test_without_images_nothing_changes(of_gemma: Caller, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = lines(capsys, "A cat", "--connect", of_gemma.connect)
    assert list(one) == ["text", "num_tokens", "embedding"]
    np.testing.assert_allclose(one["embedding"], gemma.their_vector("A cat", []), atol=1e-5)


def test_system_messages(of_qwen: Caller, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An instruction of the caller's own, the model's by name, and its default one."""
    own, connect = "Find images.", ["--connect", of_qwen.connect]
    cases: list[tuple[list[str], list[Any], str]] = [
        (["A cat", "--system", own], ["A cat"], own),
        ([*images(*files), "A cat", "--system", own], [*IMAGES, "A cat"], own),
        ([*images(files[1]), "--prompt-name", "query"], [IMAGES[1]], qwen.PROMPTS["query"]),
        ([*images(files[0]), "A cat"], [IMAGES[0], "A cat"], qwen.USUAL),
    ]
    for words, content, instruction in cases:
        (one,) = lines(capsys, *words, *connect)
        ids, vector = qwen.their_vector(content, instruction)
        assert one["num_tokens"] == len(ids)
        np.testing.assert_allclose(one["embedding"], vector, atol=1e-5)


def test_a_template_of_the_callers_own(
    of_gemma: Caller, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}see {{ message['content'] }}{% endfor %}")
    words = [*images(files[1]), "A cat", "--connect", of_gemma.connect, "--chat-template", str(template)]
    (one,) = lines(capsys, *words)
    text = f"see {MARK}\nA cat"
    np.testing.assert_allclose(one["embedding"], gemma.their_vector(text, IMAGES[1:]), atol=1e-5)


def test_what_is_refused(
    of_gemma: Caller, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torn.png").write_bytes(Path(files[0]).read_bytes()[:200])
    (tmp_path / "text.png").write_text("no image")
    cases: list[tuple[list[str], str]] = [
        (images(files[0], files[1], files[0]), "3 images; this engine takes at most 2 (limit_mm_per_prompt)"),
        (images(str(tmp_path / "torn.png")), "the image cannot be read"),
        (images(str(tmp_path / "text.png")), "the image cannot be read"),
        (images(str(tmp_path / "none.png")), "No such file"),
        (images("https://example.org/cat.png"), "Only an HTTP server with --allowed-media-domains fetches URLs"),
        ([*images(files[0]), "--prompt-name", "queries"], "'queries' is not a prompt of this model"),
        ([*images(files[0]), "--prompt-name", "query", "--system", "x"], "leave out one of them"),
    ]
    for words, text in cases:
        assert main(["embed", "A cat", *words, "--connect", of_gemma.connect]) == 1
        assert text in capsys.readouterr().err, words
    with pytest.raises(SystemExit):
        main(["embed", "--connect", of_gemma.connect])
    assert "give a TEXT, --image FILE, or both" in capsys.readouterr().err


def test_a_model_without_images(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The demo model's tokenizer and a fake engine."""
    fake = ("--executor", "fake", "-m", str(resolve_model(None)), "--executor-option", "vocab_size=49152")
    assert main(["embed", "A cat", *images(files[0]), *fake]) == 1
    assert "the chat: this engine takes no images: its model has none" in capsys.readouterr().err
