"""Vectors of chats over HTTP by a model whose files say how chats are written: Qwen3-VL-Embedding."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.core.models.idefics3_checkpoint import noise
from tests.core.models.qwen3_vl_embedding_checkpoint import PROMPTS, USUAL, their_vector, write_checkpoint
from tests.frontend.http.caller import Caller, serving
from tests.frontend.test_images import url_of

pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

IMAGES = [noise(40, 60, 1), noise(33, 25, 2)]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    folder = write_checkpoint(tmp_path_factory.mktemp("qwen3_vl_embedding"))
    with serving("-m", str(folder), "--dtype", "float32", "--threads", "1") as caller:
        yield caller


def said(*content: Any, system: str | None = None) -> list[dict[str, Any]]:
    parts = [
        {"type": "text", "text": one}
        if isinstance(one, str)
        else {"type": "image_url", "image_url": {"url": url_of(one)}}
        for one in content
    ]
    first = [] if system is None else [{"role": "system", "content": [{"type": "text", "text": system}]}]
    return [*first, {"role": "user", "content": parts}]


@pytest.mark.parametrize("content", [["A cat"], [IMAGES[0]], [IMAGES[1], IMAGES[0], "Two cats"]])
def test_the_answer_is_begun_as_the_files_say(chats: Caller, content: list[Any]) -> None:
    begun = [*said(*content, system=USUAL), {"role": "assistant", "content": [{"type": "text", "text": ""}]}]
    bodies: list[tuple[dict[str, Any], str | None, bool]] = [
        ({"messages": said(*content, system=USUAL)}, USUAL, True),
        ({"messages": said(*content), "input_type": "query"}, PROMPTS["query"], True),
        ({"messages": said(*content)}, None, True),
        ({"messages": said(*content, system=USUAL), "add_generation_prompt": False}, USUAL, False),
        ({"messages": begun, "continue_final_message": True}, USUAL, True),  # vLLM's example
    ]
    for body, instruction, opens_answer in bodies:
        answer = chats.post("/v1/embeddings", body)
        assert answer.status == 200, answer.body
        ids, vector = their_vector(content, instruction, opens_answer=opens_answer)
        assert answer.json["usage"]["prompt_tokens"] == len(ids), body
        np.testing.assert_allclose(answer.json["data"][0]["embedding"], vector, atol=1e-5)
