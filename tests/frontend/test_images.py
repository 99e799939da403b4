"""Images from LLM on: tokens are transformers', alone and in a batch, in chats, over HTTP and after a crash."""

import base64
import contextlib
import http.server
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from frontend.llm import LLM
from ipc.errors import InvalidRequestError, UnsupportedParameterError
from ipc.params.sampling_params import SamplingParams
from tests.core.models.idefics3_checkpoint import noise, processed, tiny_model, write_checkpoint
from tests.frontend.http.caller import environment, serving

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

IMAGES = [noise(100, 150, 1), noise(64, 64, 2), noise(200, 60, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=10)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 700, "max_num_batched_tokens": 100}
DOMAINS = ("--allowed-media-domains", "127.0.0.1")
QUESTION = "What is <image> this?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


def asked(*images: Any, text: str = QUESTION) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": images[0] if len(images) == 1 else list(images)}}


def url_of(image: Any) -> str:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def tokens_of(outputs: Any) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in outputs]


def theirs(ids: list[int], *images: Any) -> list[int]:
    """transformers' greedy tokens; pixels of all images as squares of one batch."""
    made = [processed(image) for image in images]
    values = np.concatenate([np.asarray(one["pixel_values"]) for one in made], 1)
    mask = np.concatenate([np.asarray(one["pixel_attention_mask"]) for one in made], 1)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    inputs |= {"pixel_values": torch.tensor(values), "pixel_attention_mask": torch.tensor(mask)}
    with torch.no_grad():
        got = tiny_model().generate(**inputs, max_new_tokens=10, do_sample=False)
    return [int(token) for token in got[0, len(ids) :]]


def test_tokens_are_those_of_transformers(llm: LLM) -> None:
    outputs = llm.generate([asked(image) for image in IMAGES], GREEDY, use_tqdm=False)
    for output, image in zip(outputs, IMAGES, strict=True):
        (tokens,) = tokens_of([output])
        assert tokens == theirs(output.prompt_token_ids, image)
        assert len(set(tokens)) > 3
    two = llm.generate(asked(*IMAGES[:2], text="A <image> and <image>?"), GREEDY, use_tqdm=False)
    assert tokens_of(two)[0] == theirs(two[0].prompt_token_ids, *IMAGES[:2])
    assert len({str(one) for one in tokens_of([*outputs, *two])}) == 4


def test_a_second_question_reads_the_cache_and_another_image_does_not(llm: LLM) -> None:
    llm.reset_prefix_cache()
    first = llm.generate(asked(IMAGES[0]), GREEDY, use_tqdm=False)[0]
    second = llm.generate(asked(IMAGES[0], text=QUESTION + " And why?"), GREEDY, use_tqdm=False)[0]
    assert second.num_cached_tokens == len(first.prompt_token_ids) // 16 * 16
    changed = IMAGES[0].copy()
    changed[50:60, 70:80] ^= 255
    other = llm.generate(asked(changed), GREEDY, use_tqdm=False)[0]
    assert other.prompt_token_ids == first.prompt_token_ids
    assert other.num_cached_tokens < 32
    before = llm.statistics()
    llm.reset_prefix_cache()
    llm.generate(asked(IMAGES[0]), GREEDY, use_tqdm=False)
    after = llm.statistics()
    assert after.num_encoder_inputs == before.num_encoder_inputs
    assert after.num_encoder_hits == before.num_encoder_hits + 7  # its squares


def test_chats(llm: LLM, tmp_path: Path) -> None:
    Image.fromarray(IMAGES[0]).save(tmp_path / "a.png")
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url_of(IMAGES[0])}},
        {"type": "image_url", "image_url": {"url": str(tmp_path / "a.png")}},
        {"type": "image", "image": Image.fromarray(IMAGES[0])},
    ]
    chats = [[{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}] for part in parts]
    outputs = llm.chat(chats, GREEDY, use_tqdm=False)
    assert len({str(tokens) for tokens in tokens_of(outputs)}) == 1
    assert outputs[0].prompt == "<|im_start|>User: <image>What?<end>\nAssistant:"
    assert tokens_of(outputs[:1])[0] == theirs(outputs[0].prompt_token_ids, IMAGES[0])
    (text,) = llm.chat([{"role": "user", "content": "What?"}], GREEDY, use_tqdm=False)
    assert text.prompt == "<|im_start|>User: What?<end>\nAssistant:"


def test_a_mark_in_somebodys_text_is_text(llm: LLM) -> None:
    image = {"type": "image", "image": IMAGES[1]}
    text = {"type": "text", "text": "How do I write an <image> tag?"}
    mark = llm.get_tokenizer().convert_tokens_to_ids("<image>")
    answer = {"role": "assistant", "content": "Write <image>."}
    after = llm.chat([{"role": "user", "content": [image, text]}], GREEDY, use_tqdm=False)[0]
    assert after.prompt == "<|im_start|>User: <image>How do I write an <image> tag?<end>\nAssistant:"
    before = llm.chat(
        [{"role": "user", "content": [text]}, answer, {"role": "user", "content": [image]}], GREEDY, use_tqdm=False
    )[0]
    assert [after.prompt_token_ids.count(mark), before.prompt_token_ids.count(mark)] == [160 + 1, 160 + 2]
    for output, images in ((after, [0]), (before, [2])):
        (prepared,) = llm._engine.prepare([{**asked(IMAGES[1], text=output.prompt), "image_marks": images}], GREEDY)  # type: ignore[list-item]
        assert prepared.prompt.token_ids == output.prompt_token_ids
        uses = [feature.use for feature in prepared.prompt.features]
        begins = [llm.get_tokenizer().decode([output.prompt_token_ids[use.position - 1]]) for use in uses]
        assert begins == [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)] + ["<global-img>"]
    wrong: list[Any] = [[1, 0], [-1], "0", [0.5]]
    for marks in wrong:
        with pytest.raises(InvalidRequestError, match=r"image_marks|token ids must be ints"):
            llm.generate({**asked(IMAGES[1]), "image_marks": marks}, GREEDY, use_tqdm=False)


def test_a_request_goes_on_after_a_crash(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=150)
    expected = tokens_of(llm.generate(asked(IMAGES[0]), params, use_tqdm=False))
    llm.client.pause()  # it would be answered before the kill if this process had to wait for a core
    llm.llm_engine.add_request("a", asked(IMAGES[0]), params)
    os.kill(llm.client.welcome.pid, signal.SIGKILL)
    outputs: list[Any] = []
    while not outputs or not outputs[-1].finished:
        outputs += llm.llm_engine.step()
    assert tokens_of(outputs[-1:]) == expected
    assert llm.client.welcome.epoch == 1


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (asked(IMAGES[1], text="No mark"), InvalidRequestError, "<image> 0 times but 1 image"),
    ({"prompt": "a", "multi_modal_data": {"audio": b""}}, UnsupportedParameterError, "has audio"),
    ({"prompt": "a", "multi_modal_data": IMAGES[1]}, InvalidRequestError, "must be {'image': ...}"),
    ({"prompt_token_ids": [1], "multi_modal_data": {"image": IMAGES[1]}}, InvalidRequestError, "prompt that is text"),
    (asked(3), InvalidRequestError, "got int"),
]


@pytest.mark.parametrize(("prompt", "error", "text"), WRONG)
def test_wrong_prompts(llm: LLM, prompt: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        llm.generate(prompt, GREEDY, use_tqdm=False)  # type: ignore[arg-type]


def test_images_of_more_bytes_than_a_session_may_put(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    few = msgspec.structs.replace(llm.client.welcome.features, max_bytes=100_000)
    monkeypatch.setattr(llm.client, "welcome", msgspec.structs.replace(llm.client.welcome, features=few))
    with pytest.raises(InvalidRequestError, match="take more than 100000 bytes as squares"):
        llm.generate(asked(IMAGES[1]), GREEDY, use_tqdm=False)  # type: ignore[arg-type]


def test_a_model_without_images_says_so() -> None:
    with LLM(executor="fake") as llm, pytest.raises(UnsupportedParameterError, match="takes no images"):
        llm.generate(asked(IMAGES[1]), use_tqdm=False)  # type: ignore[arg-type]


def test_over_http_and_from_the_command_line(folder: Path, llm: LLM, tmp_path: Path) -> None:
    message = {"role": "user", "content": [{"type": "image", "image": IMAGES[1]}, {"type": "text", "text": "What?"}]}
    (expected,) = tokens_of(llm.chat([message], GREEDY, use_tqdm=False))
    options = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    pages = folder / "pages"
    pages.mkdir()
    Image.fromarray(IMAGES[1]).save(pages / "a.png")
    with files_at(pages) as port, serving("-m", str(folder), *options, *DOMAINS) as caller:

        def ask(url: str) -> Any:
            part = {"type": "image_url", "image_url": {"url": url}}
            content = [part, {"type": "text", "text": "What?"}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 10, "temperature": 0}
            return caller.post("/v1/chat/completions", {**body, "return_token_ids": True})

        for url in (url_of(IMAGES[1]), f"http://127.0.0.1:{port}/a.png"):
            answer = ask(url)
            assert answer.status == 200, answer.json
            assert answer.json["choices"][0]["token_ids"] == expected
        refused = ask(f"http://localhost:{port}/a.png")
        assert (refused.status, "does not name it" in refused.json["error"]["message"]) == (400, True)
        data = url_of(IMAGES[1]).split(",")[1]
        text = answer.json["choices"][0]["message"]["content"]
        block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        chat = [{"role": "user", "content": [block, {"type": "text", "text": "What?"}]}]
        body = {"messages": chat, "max_tokens": 10, "temperature": 0}
        assert caller.post("/v1/messages", body).json["content"][0]["text"] == text
        block["source"] = {"type": "url", "url": f"http://127.0.0.1:{port}/a.png"}
        assert caller.post("/v1/messages", body).json["content"][0]["text"] == text
        part = {"type": "input_image", "image_url": f"http://127.0.0.1:{port}/a.png"}
        asked_for = [{"role": "user", "content": [part, {"type": "input_text", "text": "What?"}]}]
        body = {"input": asked_for, "max_output_tokens": 10, "temperature": 0}
        assert caller.post("/v1/responses", body).json["output"][0]["content"][0]["text"] == text
        parts = [{"type": "input_image", "image_url": url_of(IMAGES[1])}, {"type": "input_text", "text": "What?"}]
        asked = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 10, "temperature": 0}
        assert caller.post("/v1/responses", asked).json["output"][0]["content"][0]["text"] == text
        for url in (str(tmp_path / "a.png"), "file:///a.png"):
            refused = ask(url)
            assert refused.status == 400
            assert "must be data:image/" in refused.json["error"]["message"]
        Image.fromarray(IMAGES[1]).save(tmp_path / "a.png")
        command = [sys.executable, "-m", "engine_core", "generate", "--connect", caller.connect, "--image"]
        command += [str(tmp_path / "a.png"), "--temperature", "0", "--max-tokens", "10", "--quiet", "What?"]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        text = llm.get_tokenizer().decode(expected, skip_special_tokens=True)
        assert _printable(done.stdout) == _printable(text) != ""


@contextlib.contextmanager
def files_at(folder: Path) -> Iterator[int]:
    """Serve a folder's files on this machine; yield the port."""

    class Files(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _printable(text: str) -> str:
    """Without what a terminal does not show."""
    return "".join(one for one in text if one.isprintable() and one != "\ufffd").strip()
