"""Adapters (LoRA) of encoders: vectors are those of the merged model, and functions of prompt and adapter alone."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from engine_core import LLM, LoRARequest
from ipc.errors import ModelFileError
from tests.core.adapters.peft_files import write_peft
from tests.core.models.encoder_checkpoints import KINDS, save_encoder, states, unit
from tests.core.models.float_errors import check_errors

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 24, "skip_tokenizer_init": True, "enable_lora": True}
_RNG = np.random.Generator(np.random.PCG64(8))
PROMPTS = [_RNG.integers(3, 120, length).tolist() for length in (1, 7, 200, 33)]
RANK, ALPHA = 4, 6.0


#: A BERT classifier's layers after the pooling.
AFTER = "bert.pooler.dense", "classifier"
_PREFIX = "base_model.model."


def adapt(
    model: Any, folder: Path, seed: int, *, tables: bool, linear: bool = True, without: tuple[str, ...] = ()
) -> Any:
    """Write an adapter and return the model merged with it.

    tables: whether it changes those of words and kinds. linear: whether it changes all linear layers but `without`.
    """
    merged, rng, tensors, pairs = copy.deepcopy(model), np.random.default_rng(seed), {}, {}
    for name, layer in merged.named_modules():
        is_table = isinstance(layer, torch.nn.Embedding) and tables and "position" not in name
        if name in without or not (is_table or (linear and isinstance(layer, torch.nn.Linear))):
            continue
        columns, depth = layer.weight.T.shape if is_table else layer.weight.shape
        a = rng.standard_normal((RANK, depth), np.float32) * np.float32(0.3 if is_table else depth**-0.5)
        b = rng.standard_normal((columns, RANK), np.float32) * np.float32(0.2)
        more = ALPHA / RANK * torch.from_numpy(b) @ torch.from_numpy(a)
        layer.weight.data += more.T if is_table else more
        if is_table:
            tensors |= {f"{_PREFIX}{name}.lora_embedding_A": a, f"{_PREFIX}{name}.lora_embedding_B": b}
        else:
            pairs[name] = a, b
    write_peft(folder, pairs, rank=RANK, alpha=ALPHA, target_modules=None)
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | tensors, file)
    return merged


def embedded(llm: LLM, prompts: list[list[int]], adapters: list[str | None]) -> list[Any]:
    requests = [None if name is None else LoRARequest(name, 1) for name in adapters]
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.embed(inputs, use_tqdm=False, lora_request=requests)
    return [np.array(one.outputs.embedding, np.float32) for one in outputs]


def mean(model: Any, ids: list[int]) -> Any:
    return unit(states(model, ids).mean(0, dtype=np.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_the_merged_model(kind: str, tmp_path: Path) -> None:
    theirs = save_encoder(tmp_path / "model", kind, "Model")
    merged = adapt(theirs, tmp_path / "adapter", 1, tables=kind != "ModernBert")
    modules = {"a": str(tmp_path / "adapter")}
    with LLM(str(tmp_path / "model"), **SMALL, dtype="float32", lora_modules=modules) as llm:
        assert llm.numerics == "L2"
        found = embedded(llm, PROMPTS, ["a", None, "a", None])
    for ids, vector, model in zip(PROMPTS, found, (merged, theirs, merged, theirs), strict=True):
        np.testing.assert_allclose(vector, mean(model, ids), atol=1e-5)
    assert abs(mean(merged, PROMPTS[2]) - mean(theirs, PROMPTS[2])).max() > 0.01


def test_an_adapter_of_tables_alone(tmp_path: Path) -> None:
    theirs = save_encoder(tmp_path, "Bert", "Model")
    merged = adapt(theirs, tmp_path / "a", 1, tables=True, linear=False)
    with LLM(str(tmp_path), **SMALL, dtype="float32", lora_modules={"a": str(tmp_path / "a")}) as llm:
        found = embedded(llm, PROMPTS, ["a", None, "a", "a"])
    for ids, vector, model in zip(PROMPTS, found, (merged, theirs, merged, merged), strict=True):
        np.testing.assert_allclose(vector, mean(model, ids), atol=1e-5)
    assert abs(mean(merged, PROMPTS[2]) - mean(theirs, PROMPTS[2])).max() > 0.01


def test_a_classifiers_adapter_is_as_if_merged_and_one_of_its_head_is_refused(tmp_path: Path) -> None:
    theirs = save_encoder(tmp_path, "Bert", "ForSequenceClassification", num_labels=2)
    merged = adapt(theirs, tmp_path / "a", 1, tables=True, without=AFTER)
    with LLM(str(tmp_path), **SMALL, dtype="float32", lora_modules={"a": str(tmp_path / "a")}) as llm:
        inputs = [{"prompt_token_ids": ids} for ids in PROMPTS]
        requests = [LoRARequest("a", 1), None] * 2
        found = [one.outputs.probs for one in llm.classify(inputs, use_tqdm=False, lora_request=requests)]
    for ids, probs, model in zip(PROMPTS, found, (merged, theirs) * 2, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0].softmax(-1)
        np.testing.assert_allclose(probs, expected.numpy(), atol=1e-5)
    for without in (AFTER[1:], AFTER[:1]):
        adapt(theirs, tmp_path / "b", 1, tables=False, without=without)
        with pytest.raises(ModelFileError, match=f"changes '({'|'.join(AFTER)})', but the model has no such matrix"):
            LLM(str(tmp_path), **SMALL, dtype="float32", lora_modules={"a": str(tmp_path / "b")})


def test_vectors_in_bfloat16_are_as_near_as_those_of_the_merged_model(tmp_path: Path) -> None:
    """Near those of float32, as transformers' of the merged model in bfloat16 are."""
    merged = adapt(save_encoder(tmp_path, "Bert", "Model"), tmp_path / "a", 1, tables=True)
    with LLM(str(tmp_path), **SMALL, dtype="bfloat16", lora_modules={"a": str(tmp_path / "a")}) as llm:
        found = embedded(llm, PROMPTS, ["a"] * len(PROMPTS))
    exact, single = [mean(merged, ids) for ids in PROMPTS], copy.deepcopy(merged).bfloat16()
    theirs = [mean(single, ids) for ids in PROMPTS]
    check_errors(abs(np.array(found) - exact), abs(np.array(theirs) - exact))


@pytest.fixture(scope="module")
def jina(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder like jina-embeddings-v3-hf: each task's adapter in a folder of its own; and the merged models."""
    folder = tmp_path_factory.mktemp("jina")
    base = save_encoder(folder, "JinaEmbeddingsV3", "Model", type_vocab_size=1)
    tasks = ("retrieval.query", "retrieval.passage", "text-matching")
    merged = {
        task: adapt(base, folder / task.translate(str.maketrans(".-", "__")), seed, tables=seed != 2)
        for seed, task in enumerate(tasks)
    }
    return folder, merged


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jinas_tasks_in_one_batch(dtype: str, jina: tuple[Path, dict[str, Any]]) -> None:
    folder, merged = jina
    modules = {task: str(folder / task.translate(str.maketrans(".-", "__"))) for task in merged}
    tasks = [*merged, None] * 3
    prompts = [PROMPTS[number % 4] for number in (0, 1, 2, 3, 2, 2, 2, 2, 3, 0, 1, 1)]
    with LLM(str(folder), **SMALL, dtype=dtype, lora_modules=modules) as llm:
        together = embedded(llm, prompts, tasks)
        for ids, task, vector in zip(prompts, tasks, together, strict=True):
            assert embedded(llm, [ids], [task])[0].tobytes() == vector.tobytes()
            if task is not None and dtype == "float32":
                np.testing.assert_allclose(vector, mean(merged[task], ids), atol=1e-5)
    with LLM(str(folder), **SMALL | {"enable_lora": False}, dtype=dtype) as plain:
        assert embedded(plain, prompts[3:4], [None])[0].tobytes() == together[3].tobytes()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"embeddings.position_embeddings.lora_embedding_A": (4, 300)}, "only those of words and of kinds of tokens"),
        ({"embeddings.word_embeddings.lora_embedding_A": (4, 119)}, r"matrix is \[48, 120\]"),
        ({"classifier.lora_A.weight": (4, 48), "classifier.lora_B.weight": (2, 4)}, "has no such matrix"),
    ],
)
def test_what_is_refused(change: dict[str, tuple[int, int]], text: str, tmp_path: Path) -> None:
    adapt(save_encoder(tmp_path, "Bert", "Model"), tmp_path / "a", 1, tables=True)
    file = tmp_path / "a/adapter_model.safetensors"
    more = {f"{_PREFIX}{name}": np.zeros(shape, np.float32) for name, shape in change.items()}
    save_file(load_file(file) | more, file)
    with pytest.raises(ModelFileError, match=text):
        LLM(str(tmp_path), **SMALL, dtype="float32", lora_modules={"a": str(tmp_path / "a")})
