"""Vectors of images over HTTP: vLLM's messages, Jina's inputs, URLs that are fetched, and what is refused."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.core.models.embedding_gemma2_checkpoint import PROMPTS, their_states, their_vector, write_checkpoint
from tests.core.models.idefics3_checkpoint import noise
from tests.frontend.http.caller import Caller, serving
from tests.frontend.test_images import files_at, url_of

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

IMAGES = [noise(100, 150, 1), noise(33, 25, 2), noise(200, 60, 3)]
MARK = "<|image|>"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    """A server with a model that embeds images."""
    folder = write_checkpoint(tmp_path_factory.mktemp("embedding_gemma2"))
    options = ("--dtype", "float32", "--threads", "1", "--allow-request-templates")
    with serving("-m", str(folder), *options, "--allowed-media-domains", "127.0.0.1") as caller:
        yield caller


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def check(caller: Caller, body: dict[str, Any], *expected: tuple[str, list[int]]) -> None:
    """expected: of each vector, the text as transformers' processor takes it, and the indices of its images."""
    answer = caller.post("/v1/embeddings", body)
    assert answer.status == 200, answer.body
    count = 0
    for entry, (text, indices) in zip(answer.json["data"], expected, strict=True):
        own = [IMAGES[index] for index in indices]
        np.testing.assert_allclose(entry["embedding"], their_vector(text, own), atol=1e-5)
        count += len(their_states(text, own)[0])
    assert answer.json["usage"]["prompt_tokens"] == count


def test_a_chat_with_images_is_one_vector(images: Caller) -> None:
    """Special tokens are put around it, as its chat template does not, and the model's prompt is a system message."""
    urls = [url_of(image) for image in IMAGES]
    check(images, {"messages": chat(part(urls[0]))}, (MARK, [0]))
    mixed = chat(part(urls[1]), {"type": "text", "text": " and "}, part(urls[2]))
    check(images, {"messages": mixed}, (f"{MARK} and {MARK}", [1, 2]))
    check(images, {"messages": mixed, "input_type": "query"}, (f"{PROMPTS['query']}{MARK} and {MARK}", [1, 2]))
    check(images, {"messages": mixed, "prompt_name": "STS"}, (f"{PROMPTS['STS']}{MARK} and {MARK}", [1, 2]))
    two = [*chat(part(urls[1])), {"role": "assistant", "content": "A cat"}]
    check(images, {"messages": two}, (f"{MARK}A cat", [1]))
    check(images, {"messages": chat({"type": "text", "text": "a text"})}, ("a text", []))


def test_a_chat_template_may_write_special_tokens(images: Caller) -> None:
    """If it begins with that of a text, none is added unless the request says so."""
    written = "<bos>{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<eos>{% endfor %}"
    body = {"messages": chat({"type": "text", "text": "see"}, part(url_of(IMAGES[1]))), "chat_template": written}
    check(images, body, (f"user: see\n{MARK}", [1]))
    more = images.post("/v1/embeddings", {**body, "add_special_tokens": True}).json["usage"]["prompt_tokens"]
    assert more == len(their_states(f"user: see\n{MARK}", [IMAGES[1]])[0]) + 2
    named = images.post("/v1/embeddings", {**body, "prompt_name": "STS"}).json["usage"]["prompt_tokens"]
    assert named == more - 2 + len(f"system: {PROMPTS['STS']}") + 1


def test_jinas_inputs_are_a_vector_each(images: Caller) -> None:
    url = url_of(IMAGES[0])
    entries = [{"image": url}, {"text": "a text"}, {"image": url_of(IMAGES[1]).partition(",")[2]}, "another"]
    check(images, {"input": entries}, (MARK, [0]), ("a text", []), (MARK, [1]), ("another", []))
    named = {"input": entries[:2], "input_type": "document"}
    check(images, named, (PROMPTS["document"] + MARK, [0]), (f"{PROMPTS['document']}a text", []))
    pooled = images.post("/pooling", {"input": entries[:1], "task": "token_embed", "use_activation": False}).json
    np.testing.assert_allclose(pooled["data"][0]["data"], their_states(MARK, IMAGES[:1])[1], atol=1e-3)


def test_images_are_fetched_under_the_rules_of_chats(images: Caller, tmp_path: Path) -> None:
    Image.fromarray(IMAGES[2]).save(tmp_path / "a.png")
    with files_at(tmp_path) as port:
        url = f"http://127.0.0.1:{port}/a.png"
        check(images, {"messages": chat(part(url), {"type": "text", "text": "x"})}, (f"{MARK}x", [2]))
        check(images, {"input": [{"image": url}, {"image": url}]}, (MARK, [2]), (MARK, [2]))
        for body, text in (
            ({"messages": chat(part(f"http://localhost:{port}/a.png"))}, "does not name it"),
            ({"input": [{"image": f"{url}x"}]}, f"{port}/a.pngx"),
        ):
            refused = images.post("/v1/embeddings", body)
            assert (refused.status, text in refused.json["error"]["message"]) == (400, True), refused.json


@pytest.mark.parametrize(
    ("path", "more", "text"),
    [
        ("/v1/embeddings", {"truncate_prompt_tokens": 5}, "prompt with images"),
        ("/v1/embeddings", {"dimensions": 1 << 20}, "dimensions"),
        ("/classify", {}, "classify"),
        ("/v1/embeddings", {"prompt_name": "unknown"}, "prompt_name='unknown' is not a prompt of this model"),
    ],
)
def test_nothing_is_fetched_for_what_is_refused(
    images: Caller, tmp_path: Path, path: str, more: dict[str, Any], text: str
) -> None:
    """The file is not there, which a request that is fetched says."""
    with files_at(tmp_path) as port:
        url = f"http://127.0.0.1:{port}/none.png"
        assert "none.png" in images.post("/v1/embeddings", {"input": [{"image": url}]}).json["error"]["message"]
        for body in ({"messages": chat(part(url))}, {"input": [{"image": url}]}):
            message = images.post(path, {**body, **more}).json["error"]["message"]
            assert text in message
            assert "none.png" not in message
        message = images.post("/v1/embeddings", {"input": [{"image": url}, "a " * 20_000]}).json["error"]["message"]
        assert "40000 characters" in message


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": chat(part("/etc/hostname"))}, "must be data:image/"),
        ({"messages": chat({"type": "image", "image": "/etc/hostname"})}, "must be data:image/"),
        ({"messages": chat(part("file:///etc/hostname"))}, "must be data:image/"),
        ({"messages": chat({"type": "video_url", "video_url": {"url": "data:,"}})}, "takes text and images only"),
        ({"messages": chat({"type": "input_audio", "input_audio": {"data": "x"}})}, "takes text and images only"),
        ({"messages": chat(part("data:image/png;base64,AAAA"))}, "cannot be read"),
        ({"input": [{"image": "/etc/hostname"}]}, "not base64"),
        ({"input": [{"image": "file:///etc/hostname"}]}, "must be data:image/"),
        ({"input": {"prompt": MARK, "multi_modal_data": {"image": "/etc/hostname"}}}, "an entry of input is a text"),
        ({"input": [{"prompt": MARK, "multi_modal_data": {"image": "/etc/hostname"}}]}, "an entry of input is a text"),
        ({"input": [{"text": "a", "image": "b"}]}, "text and images together are messages"),
        ({"input": [{"image": 5}]}, "an entry of input is a text"),
        ({"input": [{"image": "AAAA"}] * 9}, "9 images in one request; at most 8 are allowed"),
        ({"messages": chat(part(url_of(IMAGES[1])), {"type": "text", "text": "a " * 20_000})}, "40009 characters"),
        ({"input": [{"image": url_of(IMAGES[1])}], "truncate_prompt_tokens": 5}, "prompt with images"),
    ],
)
def test_what_is_refused(images: Caller, body: dict[str, Any], text: str) -> None:
    answer = images.post("/v1/embeddings", body)
    assert (answer.status, text in answer.json["error"]["message"]) == (400, True), answer.json


def test_a_model_of_texts_refuses_images(served: Caller) -> None:
    url = url_of(IMAGES[1])
    for body in ({"messages": chat(part(url))}, {"input": [{"image": url}]}):
        for path in ("/v1/embeddings", "/pooling"):
            answer = served.post(path, body)
            assert answer.status == 400
            assert re.search("takes text only|takes no images", answer.json["error"]["message"]), answer.json
    assert (
        served.post("/v1/embeddings", {"input": [{"text": "a"}]}).json
        == served.post("/v1/embeddings", {"input": "a"}).json
    )
