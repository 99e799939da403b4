"""Models that pool, against transformers on tiny random checkpoints; and bits that depend on the prompt alone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from engine_core import LLM, ConfigError, InvalidRequestError, ModelFileError, PoolingParams, UnsupportedModelError
from ipc.tables.arrays import Floats
from tests.core.models.checkpoints import SIZES

PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 17, 60)]
SMALL: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "skip_tokenizer_init": True}
QWEN3 = {**SIZES, "head_dim": 16, "use_sliding_window": False}


def save(folder: Path, kind: str, config: Any) -> Any:
    """A random checkpoint of transformers' class `kind`; the model in float32."""
    import transformers

    torch.manual_seed(3)
    model = getattr(transformers, kind)(config).eval().float()
    model.save_pretrained(folder)
    return model


def add_modules(folder: Path, mode: str, normalises: bool = True, dense: int = 0) -> None:
    """sentence-transformers' files beside the weights."""
    kinds = ["Transformer", "Pooling", *["Dense"] * bool(dense), *["Normalize"] * normalises]
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": f"a.b.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 48, f"pooling_mode_{mode}": True, "pooling_mode_sqrt": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    if dense:
        (folder / "2_Dense").mkdir()
        rng = np.random.default_rng(0)
        tensors = {"linear.weight": rng.standard_normal((dense, 48)), "linear.bias": rng.standard_normal(dense)}
        save_file(
            {name: value.astype(np.float32) for name, value in tensors.items()}, folder / "2_Dense/model.safetensors"
        )
        (folder / "2_Dense/config.json").write_text(json.dumps({"activation_function": "torch.nn.Tanh"}))


def hidden_states(model: Any, ids: list[int]) -> Floats:
    with torch.no_grad():
        hidden: Floats = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return hidden


def unit(x: Any) -> Any:
    return x / np.linalg.norm(x)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    import transformers

    folder = tmp_path_factory.mktemp("qwen3")
    return folder, save(folder, "Qwen3Model", transformers.Qwen3Config(**QWEN3))


@pytest.fixture(scope="module")
def llm(qwen3: tuple[Path, Any]) -> Iterator[LLM]:
    with LLM(str(qwen3[0]), **SMALL) as engine:
        yield engine


def vectors(llm: LLM, prompts: list[list[int]], task: str = "embed", **params: Any) -> list[Floats]:
    outputs = llm.encode(prompts, PoolingParams(**params), use_tqdm=False, pooling_task=task)  # type: ignore[arg-type]
    return [output.outputs.data for output in outputs]


def test_the_last_token_of_a_model_without_a_head(llm: LLM, qwen3: tuple[Path, Any]) -> None:
    for ids, vector in zip(PROMPTS, vectors(llm, PROMPTS), strict=True):
        np.testing.assert_allclose(vector, unit(hidden_states(qwen3[1], ids)[-1]), atol=1e-5)
    assert llm.client.welcome.tasks == {"embed": 48, "token_embed": 48}
    assert llm.client.welcome.numerics in ("L2", "L0")


def test_dimensions_activation_and_each_token(llm: LLM, qwen3: tuple[Path, Any]) -> None:
    hidden = hidden_states(qwen3[1], PROMPTS[2])
    (short,) = vectors(llm, PROMPTS[2:3], dimensions=7)
    np.testing.assert_allclose(short, unit(hidden[-1, :7]), atol=1e-5)
    (raw,) = vectors(llm, PROMPTS[2:3], use_activation=False)
    np.testing.assert_allclose(raw, hidden[-1], atol=1e-5)
    (each,) = vectors(llm, PROMPTS[2:3], "token_embed", use_activation=False)
    np.testing.assert_allclose(each, hidden, atol=1e-5)


def test_vectors_are_functions_of_their_prompts_alone(llm: LLM, qwen3: tuple[Path, Any]) -> None:
    """Alone, together, in chunks of 5 tokens, with and without a prefix cache hit: the same bits."""
    if llm.numerics != "L2":
        pytest.skip("numerics L2 needs the C kernels")
    prompts = [PROMPTS[3], PROMPTS[3][:40], PROMPTS[2], PROMPTS[3]]
    llm.reset_prefix_cache()
    results = _alone_and_together(llm, prompts)
    assert llm.encode(prompts, use_tqdm=False)[3].num_cached_tokens == 48
    for options in ({"max_num_batched_tokens": 5, "max_num_seqs": 2}, {"enable_prefix_caching": False}):
        with LLM(str(qwen3[0]), **SMALL, **options) as other:
            results += _alone_and_together(other, prompts)
    for task, found in results:
        first = next(other for name, other in results if name == task)
        assert [one.tobytes() for one in found] == [one.tobytes() for one in first]


def _alone_and_together(llm: LLM, prompts: list[list[int]]) -> list[tuple[str, list[Floats]]]:
    results = []
    for task in ("embed", "token_embed"):
        results.append((task, [vectors(llm, [prompt], task)[0] for prompt in prompts]))
        results.append((task, vectors(llm, prompts, task)))
    return results


def test_a_gemma_3_whose_tokens_see_both_sides(tmp_path: Path) -> None:
    """EmbeddingGemma: a window of 10 is 5 tokens on each side; the mean of all tokens, a Dense, a norm."""
    import transformers

    sizes = {**SIZES, "head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 3, "sliding_window": 10}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(**sizes, layer_types=kinds, use_bidirectional_attention=True)
    model = save(tmp_path, "Gemma3TextModel", config)
    add_modules(tmp_path, "mean_tokens", dense=6)
    weights = load_file(tmp_path / "2_Dense/model.safetensors")
    with LLM(str(tmp_path), **SMALL) as llm:
        assert (llm.numerics, llm.client.welcome.is_encoder) == ("L2", True)
        together = vectors(llm, PROMPTS)
        for ids, vector in zip(PROMPTS, together, strict=True):
            mean = hidden_states(model, ids).mean(0)
            dense = np.tanh(weights["linear.weight"] @ mean + weights["linear.bias"])
            np.testing.assert_allclose(vector, unit(dense), atol=1e-5)
            assert vectors(llm, [ids])[0].tobytes() == vector.tobytes()
    with pytest.raises(ConfigError, match="is an encoder, which needs the C kernels"):
        LLM(str(tmp_path), **SMALL, numerics="L0")


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token", "max_tokens"])
def test_pooling_by_the_files(tmp_path: Path, mode: str) -> None:
    import transformers

    dense = 6 if mode == "mean_tokens" else 0
    model = save(tmp_path, "MistralModel", transformers.MistralConfig(**SIZES, sliding_window=None))
    add_modules(tmp_path, mode, normalises=mode != "cls_token", dense=dense)
    pooled = {"mean_tokens": lambda h: h.mean(0), "cls_token": lambda h: h[0], "max_tokens": lambda h: h.max(0)}[mode]
    expected = [pooled(hidden_states(model, ids)) for ids in PROMPTS]
    if dense:
        from safetensors.numpy import load_file

        tensors = load_file(tmp_path / "2_Dense/model.safetensors")
        expected = [np.tanh(tensors["linear.weight"] @ x + tensors["linear.bias"]) for x in expected]
    if mode != "cls_token":
        expected = [unit(x) for x in expected]
    with LLM(str(tmp_path), **SMALL, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        together, chunked = vectors(llm, PROMPTS), [vectors(llm, [ids])[0] for ids in PROMPTS]
        for found, alone, right in zip(together, chunked, expected, strict=True):
            np.testing.assert_allclose(found, right, atol=1e-5)
            if llm.numerics == "L2":
                assert found.tobytes() == alone.tobytes()


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_classifier(tmp_path: Path, num_labels: int) -> None:
    import transformers

    config = transformers.Qwen3Config(**QWEN3, num_labels=num_labels)
    model = save(tmp_path, "Qwen3ForSequenceClassification", config)
    with torch.no_grad():
        logits = [(model.model(torch.tensor([ids])).last_hidden_state @ model.score.weight.T)[0, -1] for ids in PROMPTS]
    expected = [(one.sigmoid() if num_labels == 1 else one.softmax(-1)).numpy() for one in logits]
    with LLM(str(tmp_path), **SMALL) as llm:
        for output, right in zip(llm.classify(PROMPTS, use_tqdm=False), expected, strict=True):
            np.testing.assert_allclose(output.outputs.probs, right, atol=1e-5)
        (raw,) = vectors(llm, PROMPTS[1:2], "classify", use_activation=False)
        np.testing.assert_allclose(raw, logits[1].numpy(), atol=1e-5)
        with pytest.raises(InvalidRequestError, match="'embed'"):
            llm.embed(PROMPTS, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="does not generate"):
            llm.generate({"prompt_token_ids": [3]}, use_tqdm=False)


def test_a_model_with_a_head_pools_when_asked_and_not_the_reverse(tmp_path: Path, qwen3: tuple[Path, Any]) -> None:
    import transformers

    model = save(tmp_path, "Qwen3ForCausalLM", transformers.Qwen3Config(**QWEN3, tie_word_embeddings=True))
    with LLM(str(tmp_path), **SMALL) as llm, pytest.raises(InvalidRequestError, match="runner='pooling'"):
        llm.embed([[3, 4]], use_tqdm=False)
    with LLM(str(tmp_path), **SMALL, runner="pooling") as llm:
        np.testing.assert_allclose(
            vectors(llm, PROMPTS[2:3])[0], unit(hidden_states(model.model, PROMPTS[2])[-1]), atol=1e-5
        )
    with pytest.raises(ConfigError, match="no language model head"):
        LLM(str(qwen3[0]), **SMALL, runner="generate")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "is not supported"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt"),
    ],
)
def test_pooling_that_is_refused(tmp_path: Path, change: dict[str, bool], text: str) -> None:
    import transformers

    save(tmp_path, "LlamaModel", transformers.LlamaConfig(**SIZES))
    add_modules(tmp_path, "mean_tokens")
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(change))
    with pytest.raises(UnsupportedModelError, match=text):
        LLM(str(tmp_path), **SMALL)


def test_a_score_by_two_tokens_of_a_language_model(tmp_path: Path) -> None:
    import tokenizers
    import transformers

    model = save(tmp_path, "Qwen3ForCausalLM", transformers.Qwen3Config(**QWEN3, tie_word_embeddings=False))
    words = {"no": 0, "yes": 1, "[UNK]": 2, **{f"w{index}": index for index in range(3, SIZES["vocab_size"])}}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0, -1, :2] for ids in PROMPTS]
    options = {**SMALL, "classifier_from_token": "no,yes"}
    with LLM(str(tmp_path), **options) as llm:
        for output, right in zip(llm.classify(PROMPTS, use_tqdm=False), logits, strict=True):
            np.testing.assert_allclose(output.outputs.probs, right.softmax(-1)[1:].numpy(), atol=1e-5)
    kinds = ("base.modules.transformer.Transformer", ""), ("cross_encoder.modules.LogitScore", "1_LogitScore")
    modules = [{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in kinds]
    (tmp_path / "1_LogitScore").mkdir()
    scored = {"no": {"true_token_id": 1, "false_token_id": 0}, "alone": {"true_token_id": 1, "false_token_id": None}}
    for name, tokens in scored.items():
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "1_LogitScore/config.json").write_text(json.dumps(tokens))
        with LLM(str(tmp_path), **SMALL) as llm:
            for output, right in zip(llm.classify(PROMPTS, use_tqdm=False), logits, strict=True):
                score = (right[1] - right[0] if name == "no" else right[1]).sigmoid()
                np.testing.assert_allclose(output.outputs.probs, [score.item()], atol=1e-5)
    (tmp_path / "1_LogitScore/config.json").write_text(json.dumps({"true_token_id": 300}))
    with pytest.raises(ModelFileError, match="true_token_id and false_token_id must be tokens, got 300 and None"):
        LLM(str(tmp_path), **SMALL)
    with pytest.raises(ConfigError, match="'maybe' is not a token"):
        LLM(str(tmp_path), **{**options, "classifier_from_token": "no,maybe"})
    with pytest.raises(ConfigError, match="two tokens"):
        LLM(str(tmp_path), **{**options, "classifier_from_token": "no"})
