"""/v1/embeddings, /v1/score, /v1/rerank and Ollama's /api/embed: the vectors of the Python client, in their forms."""

import asyncio
import base64
import importlib.util
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from frontend.http.errors import HttpError
from frontend.http.openai import embeddings
from frontend.http.pooling import PoolingCall
from frontend.llm import LLM
from ipc.params.pooling_params import PoolingParams
from tests.frontend.http.caller import Caller

TEXTS = ["Why is the sky blue?", "Name three colours.", "Why is the sky blue?"]


def wanted(llm: LLM, **params: Any) -> list[list[float]]:
    outputs = llm.embed(TEXTS, use_tqdm=False, pooling_params=PoolingParams(**params))
    return [output.outputs.embedding for output in outputs]


def test_floats_and_base64(served: Caller, llm: LLM) -> None:
    answer = served.post("/v1/embeddings", {"model": "demo", "input": TEXTS}).json
    assert [one["embedding"] for one in answer["data"]] == wanted(llm)
    assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", n) for n in range(3)]
    num_tokens = sum(len(llm.get_tokenizer().encode(text)) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    body = {"input": TEXTS, "encoding_format": "base64", "dimensions": 3}
    encoded = served.post("/v1/embeddings", body).json["data"]
    found = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() for one in encoded]
    assert found == wanted(llm, dimensions=3)
    ids = llm.get_tokenizer().encode(TEXTS[0])
    for given in (ids, [ids], TEXTS[0]):
        data = served.post("/v1/embeddings", {"input": given}).json["data"]
        assert [one["embedding"] for one in data] == wanted(llm)[:1]


def test_vectors_of_each_token_and_of_texts(served: Caller, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(TEXTS[0])
    (each,) = llm.encode([ids], PoolingParams(task="token_embed"), use_tqdm=False)
    answer = served.post("/pooling", {"input": TEXTS[0]}).json
    assert (answer["data"][0]["object"], answer["data"][0]["index"]) == ("pooling", 0)
    assert answer["data"][0]["data"] == each.outputs.data.tolist()
    assert answer["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    encoded = served.post("/pooling", {"input": TEXTS[0], "encoding_format": "base64"}).json["data"][0]["data"]
    assert base64.b64decode(encoded) == each.outputs.data.astype("<f4").tobytes()
    found = served.post("/pooling", {"input": TEXTS, "task": "embed", "dimensions": 3}).json["data"]
    assert [one["data"] for one in found] == wanted(llm, dimensions=3)


def test_a_chat_is_embedded_as_its_text(served: Caller, llm: LLM) -> None:
    chat = [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": "Because"}]
    for fields in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}):
        text = served.post("/apply-template", {"messages": chat, "add_generation_prompt": False, **fields}).json[
            "prompt"
        ]
        ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
        wanted = served.post("/v1/embeddings", {"input": ids}).json["data"]
        assert served.post("/v1/embeddings", {"messages": chat, **fields}).json["data"] == wanted


def test_ollama(served: Caller, llm: LLM) -> None:
    answer = served.post("/api/embed", {"model": "demo:latest", "input": TEXTS}).json
    assert answer["embeddings"] == wanted(llm)
    assert (answer["model"], answer["total_duration"] > 0) == ("demo", True)
    assert served.post("/api/embeddings", {"model": "demo", "prompt": TEXTS[0]}).json == {"embedding": wanted(llm)[0]}
    long = served.post("/api/embed", {"model": "demo", "input": "word " * 5000})
    assert (long.status, long.json["prompt_eval_count"]) == (200, 4096)
    assert served.post("/api/embed", {"model": "demo", "input": "word " * 5000, "truncate": False}).status == 400


def test_scores_are_cosines_and_the_best_comes_first(served: Caller, llm: LLM) -> None:
    scores = served.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json["data"]
    expected = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    assert [one["score"] for one in scores] == expected
    assert expected[1] == pytest.approx(1.0)
    body = {"query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[0]}], "top_n": 1}
    (best,) = served.post("/v1/rerank", body).json["results"]
    for path in ("/rerank", "/v2/rerank"):
        assert served.post(path, body).json["results"] == [best]
    assert best == {"index": 1, "relevance_score": expected[1], "document": {"text": TEXTS[0]}}


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/v1/embeddings", {"input": []}, 400, "input is missing"),
        ("/v1/embeddings", {"input": "x", "dimensions": 9}, 400, "dimensions"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, 400, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "model": "other"}, 404, "not served"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, 400, "at most 2048 are allowed"),
        ("/v1/embeddings", {"input": "x " * 9000}, 400, "at most 4096 fit"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "1 text with n"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, 400, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}, 400, "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "x"}, 400, "instruction"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "truncation_side": "right"}, 400, "truncation_side"),
        ("/v1/embeddings", {"input": "x", "truncation_side": "right"}, 400, "truncation_side"),
        ("/v1/embeddings", {"input": "x", "embed_dtype": "bfloat16"}, 400, "embed_dtype must be float32 or float16"),
        ("/v1/embeddings", {"input": "x", "endianness": "middle"}, 400, "endianness must be"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "x"}], "input": "x"}, 400, "input or messages"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": 5}]}, 400, "content"),
        ("/v1/embeddings", {"messages": [], "chat_template": "{{ 1 }}"}, 400, "chat_template is a program"),
        ("/pooling", {"input": "x", "task": "classify"}, 400, "it does embed, token_embed"),
        ("/pooling", {"input": "x", "task": "plugin"}, 400, "task"),
        ("/classify", {"input": "x"}, 400, "does not do the task 'classify': it does embed, token_embed"),
        ("/classify", {}, 400, "input is missing"),
    ],
)
def test_what_is_wrong_is_named(served: Caller, path: str, body: dict[str, Any], status: int, text: str) -> None:
    answer = served.post(path, body)
    assert (answer.status, text in answer.json["error"]["message"]) == (status, True), answer.json


@pytest.mark.parametrize(("dtype", "order"), [("float32", "big"), ("float16", "little"), ("float16", "big")])
def test_base64_has_the_type_and_the_order_that_are_asked_for(served: Caller, llm: LLM, dtype: str, order: str) -> None:
    body = {"input": TEXTS[0], "encoding_format": "base64", "embed_dtype": dtype, "endianness": order}
    data = base64.b64decode(served.post("/v1/embeddings", body).json["data"][0]["embedding"])
    found = np.frombuffer(data, np.dtype(dtype).newbyteorder(order)).astype(np.float64)
    np.testing.assert_allclose(found, wanted(llm)[0], rtol=0, atol=1e-3 if dtype == "float16" else 1e-7)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"use_activation": False}, False),
        ({"normalize": False}, False),
        ({"use_activation": True, "normalize": False}, True),
    ],
)
def test_a_vector_may_keep_its_length(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], wanted: Any) -> None:
    """The parameters of the engine's request: the fake executor's vectors have no length of their own."""
    asked: list[PoolingParams] = []

    def check(service: Any, request: Any, prompts: Any, call: PoolingCall) -> Any:
        asked.append(call.params)
        raise HttpError(503, "enough")

    monkeypatch.setattr(embeddings, "check_pooling", check)
    service: Any = SimpleNamespace(check_model=lambda request, name: "demo")
    body = msgspec.json.encode({"input": "x", **fields})
    request: Any = SimpleNamespace(decode=lambda decoder: decoder.decode(body))
    with pytest.raises(HttpError, match="enough"):
        asyncio.run(embeddings.create_embeddings(service, request))
    assert [params.use_activation for params in asked] == [wanted]


@pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs the package openai")
def test_openais_own_client(served: Caller, llm: LLM) -> None:
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none")
    found = client.embeddings.create(model="demo", input=TEXTS)  # it asks for base64
    assert [one.embedding for one in found.data] == wanted(llm)
