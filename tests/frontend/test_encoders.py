"""Encoders from text to vector: embeddings, prompts by name, truncation, pairs; by Python, HTTP, shell and replay."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_core import LLM, ConfigError, InvalidRequestError, PoolingParams
from tests.core.models.encoder_checkpoints import add_modules, add_tokenizer, save_encoder, states, unit
from tests.frontend.http.caller import Caller, serving
from tools.commands import embed
from tools.commands.replay.__main__ import main as replay

TEXTS = ["The sky is blue.", "the sky is blue today", "Bread is baked slowly in an oven!"]
PROMPTS = {"query": "query: ", "plain": ""}
SMALL: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bert")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    model = save_encoder(folder, "Bert", "Model")
    add_tokenizer(folder)
    files = {"sentence_bert_config": {"max_seq_length": 40}, "config_sentence_transformers": {"prompts": PROMPTS}}
    add_modules(folder, "mean_tokens", **files)
    return model


@pytest.fixture(scope="module")
def caller(folder: Path, theirs: Any) -> Iterator[Caller]:
    with serving("-m", str(folder), "--dtype", "float32", "--served-model-name", "bert") as served:
        yield served


@pytest.fixture(scope="module")
def llm(caller: Caller) -> Iterator[LLM]:
    with LLM(connect=caller.connect) as session:
        yield session


def embedded(llm: LLM, texts: Any, **arguments: Any) -> list[Any]:
    return [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False, **arguments)]


def test_texts_are_embedded_as_by_transformers(llm: LLM, theirs: Any) -> None:
    outputs = llm.embed(TEXTS, use_tqdm=False)
    for output in outputs:
        ids = output.prompt_token_ids
        assert (ids[0], ids[-1], len(ids) > 4) == (2, 3, True)
        np.testing.assert_allclose(output.outputs.embedding, unit(states(theirs, ids).mean(0)), atol=1e-5)
    assert [embedded(llm, text)[0] for text in TEXTS] == [output.outputs.embedding for output in outputs]
    assert (llm.numerics, llm.client.welcome.is_encoder) == ("L2", True)


def test_prompts_by_name(llm: LLM, caller: Caller, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = embedded(llm, [f"query: {text}" for text in TEXTS])
    assert embedded(llm, TEXTS, prompt_name="query") == wanted != embedded(llm, TEXTS)
    with pytest.raises(InvalidRequestError, match="'query', 'plain'"):
        llm.embed(TEXTS, use_tqdm=False, prompt_name="passage")
    data = caller.post("/v1/embeddings", {"input": TEXTS, "prompt_name": "query"}).json["data"]
    assert [one["embedding"] for one in data] == wanted
    for kind, expected in (("search_query", wanted), ("passage", embedded(llm, TEXTS))):
        data = caller.post("/v1/embeddings", {"input": TEXTS, "input_type": kind}).json["data"]
        assert [one["embedding"] for one in data] == expected
    for body, text in (({"input_type": "image"}, "input_type must be"), ({"prompt_name": ""}, "one of them")):
        answer = caller.post("/v1/embeddings", {"input": TEXTS, "input_type": "query", **body})
        assert answer.status == 400
        assert text in answer.json["error"]["message"]
    assert embed.main([*TEXTS, "--connect", caller.connect, "--prompt-name", "query"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["embedding"] for line in lines] == wanted


def test_long_texts_are_refused_or_lose_their_ends(llm: LLM, theirs: Any) -> None:
    text = "the sky is blue " * 20
    with pytest.raises(InvalidRequestError, match="at most 40 fit"):
        llm.embed(text, use_tqdm=False)
    (output,) = llm.embed(text, use_tqdm=False, pooling_params=PoolingParams(truncate_prompt_tokens=-1))
    ids = output.prompt_token_ids
    assert ids == [2, *llm.get_tokenizer().encode(text, add_special_tokens=False)[:38], 3]
    np.testing.assert_allclose(output.outputs.embedding, unit(states(theirs, ids).mean(0)), atol=1e-5)


def test_scores_of_embeddings_over_http(llm: LLM, caller: Caller) -> None:
    expected = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    found = caller.post("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}).json["results"]
    assert [one["relevance_score"] for one in found] == sorted(expected, reverse=True)


def test_classes_over_http(tmp_path: Path) -> None:
    names = {0: "bad", 1: "fair", 2: "good"}
    model = save_encoder(tmp_path, "Bert", "ForSequenceClassification", id2label=names)
    add_tokenizer(tmp_path)
    with serving("-m", str(tmp_path), "--dtype", "float32") as caller:
        answer = caller.post("/classify", {"input": TEXTS}).json
        for text, one in zip(TEXTS, answer["data"], strict=True):
            ids = caller.post("/tokenize", {"prompt": text}).json["tokens"]
            with torch.no_grad():
                probs = model(torch.tensor([ids])).logits[0].softmax(0).tolist()
            assert one["probs"] == pytest.approx(probs, abs=1e-5)
            assert (one["label"], one["num_classes"]) == (names[probs.index(max(probs))], 3)
        logits = caller.post("/classify", {"input": TEXTS[0], "use_activation": False}).json["data"][0]["probs"]
        assert sum(logits) != pytest.approx(1)
        (pooled,) = caller.post("/pooling", {"input": TEXTS[0], "task": "classify"}).json["data"]
        assert pooled["data"] == answer["data"][0]["probs"]


def test_a_cross_encoder_reads_pairs_and_its_capture_replays(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "Bert", "ForSequenceClassification", num_labels=1)
    add_tokenizer(tmp_path)
    capture = tmp_path / "run.cap"
    with LLM(str(tmp_path), **SMALL, capture=str(capture)) as llm:
        scores = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
        for text, score in zip(TEXTS[1:], scores, strict=True):
            ids, second = llm.get_tokenizer().encode_pair(TEXTS[0], text)
            assert score.prompt_token_ids == ids
            kinds = torch.tensor([[0] * second + [1] * (len(ids) - second)])
            with torch.no_grad():
                logit = model(torch.tensor([ids]), token_type_ids=kinds).logits[0, 0]
            assert score.outputs.score == pytest.approx(float(logit.sigmoid()), abs=1e-5)
        with pytest.raises(InvalidRequestError, match="'embed'"):
            llm.embed(TEXTS, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="does not generate"):
            llm.generate({"prompt_token_ids": [3]}, use_tqdm=False)
    assert replay([str(capture), "--mode", "full"]) == 0


def test_options_that_do_not_fit(folder: Path, theirs: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=8 is less than max_model_len=40"):
        LLM(str(folder), **SMALL, max_num_batched_tokens=8)
    with pytest.raises(ConfigError, match="needs the C kernels"):
        LLM(str(folder), **SMALL, numerics="L0")
    with pytest.raises(ConfigError, match="which is an encoder"):
        LLM(str(folder), **SMALL, quantization="int8")
