"""Receipts over HTTP: of chats and completions, whole and streamed; of vectors, classes and scores."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ipc.files.model_files import resolve_model
from ipc.records.receipt import Receipt, VectorHeader
from tests.frontend.http.caller import Caller, serving
from tests.frontend.http.conftest import FAKE
from tests.tools.commands.test_verify import contents_of, verdicts, write_model
from tests.tools.commands.test_verify_vectors import forged as forged_vectors
from tests.tools.commands.test_verify_vectors import of_vectors
from tools.commands.verify.__main__ import verify_receipts
from tools.commands.verify.sources import Named

OPTIONS: dict[str, Any] = {
    "model": str(resolve_model(None)),
    "executor": "fake",
    "executor_options": dict(word.split("=") for word in FAKE if "=" in word),
}


def receipts_of(answer: Any) -> list[Receipt]:
    found = [msgspec.convert(one, Receipt) for one in answer["receipts"]]
    named = [Named(str(index), one) for index, one in enumerate(found)]
    assert [one.status for one in verify_receipts(named, OPTIONS)] == ["verified"] * len(found)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_completions(served: Caller, stream: bool) -> None:
    body = {"max_tokens": 12, "temperature": 0.9, "n": 2, "receipt": True, "return_token_ids": True}
    answer = served.complete(["One", "Two"], stream=stream, **body)
    events = answer.events if stream else [answer.json]
    receipts = receipts_of(events[-1])
    ids: list[list[int]] = [[], [], [], []]
    for choice in [choice for event in events for choice in event["choices"]]:
        ids[choice["index"]] += choice["token_ids"]
    assert [answer for one in receipts for answer in one.contents.answers] == ids  # type: ignore[union-attr]
    assert len({one.header.seed for one in receipts}) == 2, "a seed was drawn for each prompt"
    assert not receipts[0].signature, "this server has no key"


@pytest.mark.parametrize("stream", [False, True])
def test_chats(served: Caller, stream: bool) -> None:
    answer = served.chat("Hello", max_tokens=12, seed=5, receipt=True, stream=stream)
    (receipt,) = receipts_of(answer.events[-1] if stream else answer.json)
    assert receipt.header.seed == f"{5:016x}"
    assert receipt.header.num_prompt_tokens > 10
    plain = served.chat("Hello", max_tokens=12, seed=5, return_token_ids=True).json
    assert "receipts" not in plain
    assert receipt.contents is not None
    assert receipt.contents.answers == [plain["choices"][0]["token_ids"]]


def test_what_has_no_receipt_is_refused(served: Caller) -> None:
    answer = served.complete("One", receipt=True, echo=True, max_tokens=0)
    assert (answer.status, "receipt" in answer.json["error"]["message"]) == (400, True)


def test_beam_searches(served: Caller) -> None:
    answer = served.complete("One", receipt=True, use_beam_search=True, n=2, max_tokens=4, return_token_ids=True)
    (receipt,) = receipts_of(answer.json)
    assert receipt.contents is not None
    assert receipt.contents.parameters["use_beam_search"]
    assert receipt.contents.answers == [choice["token_ids"] for choice in answer.json["choices"]]


TEXTS = ["Why is the sky blue?", "Name three colours.", "Why is the sky blue?"]


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/embeddings", {"input": TEXTS}, 3),
        ("/v1/embeddings", {"input": TEXTS, "dimensions": 3, "encoding_format": "base64"}, 3),
        ("/pooling", {"input": TEXTS}, 3),
        ("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}, 2),
        ("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 1}, 2),
    ],
)
def test_vectors(served: Caller, path: str, body: dict[str, Any], count: int) -> None:
    """Each text has a receipt; a cosine follows from those of its texts, of which each different one has one."""
    answer = served.post(path, {**body, "receipt": True})
    assert answer.status == 200, answer.json
    receipts = receipts_of(answer.json)
    assert len(receipts) == count
    plain = served.post(path, body).json
    assert "receipts" not in plain
    assert {**answer.json, "receipts": 0, "id": 0, "created": 0} == {**plain, "receipts": 0, "id": 0, "created": 0}
    if path == "/v1/embeddings" and "dimensions" not in body:
        for receipt, one in zip(receipts, plain["data"], strict=True):
            assert isinstance(receipt.header, VectorHeader)
            assert receipt.contents is not None
            assert receipt.header.has_vectors(receipt.contents, np.array([one["embedding"]], np.float32))


def test_classes_and_scores_of_a_classifier(tmp_path: Path) -> None:
    """Each text or pair has a receipt, which is verified; other numbers and another prompt are found."""
    model, own = write_model(tmp_path / "model", 1), {"classifier_from_token": "no,yes"}
    sizes = ("--dtype", "float32", "--threads", "1", "--max-model-len", "128")
    template = {"template": "{query} {document}"}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/classify", {"input": TEXTS[:2]}),
        ("/v1/score", {"text_1": "abc", "text_2": ["abd", "c"], **template}),
        ("/v1/rerank", {"query": "abc", "documents": ["abd", "c"], "top_n": 1, **template}),
    ]
    receipts, shown = list[Receipt](), list[list[float]]()
    with serving("-m", model, *sizes, "--classifier-from-token", own["classifier_from_token"]) as caller:
        for path, body in calls:
            answer = caller.post(path, {**body, "receipt": True})
            assert answer.status == 200, answer.body
            receipts += [msgspec.convert(one, Receipt) for one in answer.json["receipts"]]
            if path != "/v1/rerank":
                shown += [one.get("probs") or [one["score"]] for one in answer.json["data"]]
    assert len(receipts) == 6
    options = {"model": model, "dtype": "float32", "threads": 1, "max_model_len": 128, **own}
    assert [one.status for one in verdicts(receipts, options)] == ["verified"] * 6
    lies = []
    for receipt, numbers in zip(receipts, shown, strict=False):
        vectors, contents = np.array([numbers], np.float32), contents_of(receipt)
        assert isinstance(receipt.header, VectorHeader)
        assert receipt.header.has_vectors(contents, vectors), "the numbers that were shown"
        lies.append(of_vectors(receipt, np.nextafter(vectors, np.float32(2))))
        other = msgspec.structs.replace(contents, prompt_token_ids=[*contents.prompt_token_ids[:-1], 9])
        lies.append(forged_vectors(receipt, other))
    assert [one.fields for one in verdicts(lies, options)] == [["vectors"]] * 8
