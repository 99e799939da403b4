"""A photograph of 12 megapixels through a real server: tokens, a second question, its bounds, and its replay."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.model_files.loading import load_model
from frontend.llm import LLM
from ipc.options.config import EngineConfig
from kernels.elements import FLOAT32
from tests.core.models.grid_checkpoints import LARGE, greedy, tiny_tokenizer, write_checkpoint
from tests.core.models.idefics3_checkpoint import noise
from tests.frontend.http.caller import Answer, Caller, serving
from tests.placed import PREFIX
from tools.cli import main

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

#: A row is a square of 128 pixels, so that an image of this size has few of them.
ROWS = (3000 // 128) * (4000 // 128)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(LARGE, tmp_path_factory.mktemp("large")))


def url_of(array: Any, form: str = "JPEG") -> str:
    file = io.BytesIO()
    Image.fromarray(array).save(file, form, quality=80)
    kind = f"image/{form.lower()}"
    return f"data:{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture(scope="module")
def photo() -> str:
    return url_of(np.tile(noise(60, 80, 3), (50, 50, 1)))


def ask(caller: Caller, url: str, text: str = "What?", **fields: Any) -> Answer:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 6, **fields}
    return caller.post("/v1/chat/completions", {"return_token_ids": True, **body})


@pytest.fixture
def options(model: str, tmp_path: Path) -> list[str]:
    return ["-m", model, "--dtype", "float32", "--max-model-len", "1024", "--listen", f"ipc://{tmp_path}/engine.sock"]


def test_a_photograph_over_http_and_in_a_replay(
    options: list[str], photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = str(tmp_path / "run.cap")
    with serving(*options, "--capture", capture) as caller:
        first, second = ask(caller, photo), ask(caller, photo, "Why?")
        for answer in (first, second):
            assert answer.status == 200, answer.body
            ids, mark = answer.json["prompt_token_ids"], tiny_tokenizer().token_to_id("<|image_pad|>")
            assert ids.count(mark) == ROWS
            assert answer.json["usage"]["prompt_tokens"] == len(ids)
        # The second answer is from what the first one has encoded, and the reference takes seconds.
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(photo.partition(",")[2]))).convert("RGB"))
        assert second.json["choices"][0]["token_ids"] == greedy(LARGE, second.json["prompt_token_ids"], [pixels], 6)
        with LLM(connect=caller.connect) as llm:
            statistics = llm.statistics()
        assert statistics.num_encoder_inputs == 1
        assert first.json["usage"]["prompt_tokens"] - second.json["usage"]["prompt_tokens"] == len("What?") - len(
            "Why?"
        )
    assert main(["replay", capture]) == 0
    assert "0 differences" in capsys.readouterr().out


def test_a_bound_on_pixels_makes_it_smaller(options: list[str], photo: str) -> None:
    with serving(*options, "--image-max-pixels", "1048576") as caller:
        answer = ask(caller, photo)
        assert answer.status == 200, answer.body
        mark = tiny_tokenizer().token_to_id("<|image_pad|>")
        assert 40 < answer.json["prompt_token_ids"].count(mark) <= 1048576 // 128**2


def test_what_is_too_large_is_refused_and_harms_no_other(options: list[str]) -> None:
    wide = url_of(np.zeros((5000, 8000, 3), np.uint8), "PNG")  # 40 megapixels in some kilobytes
    long = "data:image/png;base64," + "A" * (45 << 20)
    with serving(*options, "--max-body-bytes", str(64 << 20)) as caller:
        for url, text in ((wide, "pixels"), (long, "an image's file has at most 33554432 bytes")):
            answer = ask(caller, url)
            assert answer.status == 400
            assert text in answer.json["error"]["message"]
        with LLM(connect=caller.connect) as llm:
            assert llm.statistics().num_encoder_inputs == 0
        assert caller.chat(max_tokens=2).status == 200
    with serving(*options, "--max-body-bytes", str(1 << 20)) as caller:
        assert ask(caller, long).status == 413


def test_an_engine_says_that_images_may_be_long(
    model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"{PREFIX}core.model_files.loading.LONG_IMAGE", 1000)
    load_model(Path(model), FLOAT32, EngineConfig())
    assert "an image may have up to 1024 tokens" in capfd.readouterr().err
    load_model(Path(model), FLOAT32, EngineConfig(image_max_pixels=1000 * 128**2))
    assert "an image may have" not in capfd.readouterr().err
