"""Encoders against transformers, on tiny random checkpoints: hidden states, classifiers, and what files may say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.model_files.model_config import read_model_config
from core.model_files.pooling import read_pooler
from core.model_files.tensors.weights import load_weights
from core.models.encoder import Encoder
from core.models.step import ModelInputs
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.options.config import EngineConfig
from ipc.params.pooling_params import PoolingParams
from ipc.tables.arrays import Floats
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.elements import FLOAT32
from tests.core.models.encoder_checkpoints import KINDS, save_encoder, states

RNG = np.random.Generator(np.random.PCG64(2))
#: Token ids; the longest prompt has many windows of ModernBERT and passes a chunk of the cache at each end.
PROMPTS = [RNG.integers(3, 120, length).tolist() for length in (1, 7, 300, 16, 65)]


def load(folder: Path, library: CpuLibrary | None = None) -> Encoder:
    config, library = read_model_config(folder), library or load_cpu_library()
    return Encoder(config, load_weights(folder, config, FLOAT32, library), FLOAT32, library)


def hidden(model: Encoder, prompts: list[list[int]], block_size: int = 16) -> list[Floats]:
    """The hidden states of each prompt, computed in one step."""
    counts = np.array([len(ids) for ids in prompts])
    blocks = -(-counts // block_size)
    tables = np.zeros((len(prompts), blocks.max()), np.int32)
    slots, positions, first = [], [], 1
    for row, (count, size) in enumerate(zip(counts.tolist(), blocks.tolist(), strict=True)):
        tables[row, :size] = np.arange(first, first + size)
        positions.append(np.arange(count))
        slots.append(first * block_size + np.arange(count))
        first += size
    cache = model.allocate_cache(first, block_size)
    cache.memory[0].view(np.uint8)[...] = 255  # NaN: what no token has written is not read
    work = model.attention_metadata(counts, counts, tables, cache)
    tokens = np.concatenate([np.array(ids) for ids in prompts])
    columns = tokens, np.concatenate(positions), np.concatenate(slots)
    result = model.forward(ModelInputs(*columns, work, cache, np.zeros(0, np.int64)))
    return np.split(result.hidden_of(np.arange(len(tokens))), np.cumsum(counts)[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    theirs, ours = save_encoder(tmp_path, kind, "Model"), load(tmp_path)
    assert ours.max_model_len == 300
    for block_size in (16, 8):
        for ids, found in zip(PROMPTS, hidden(ours, PROMPTS, block_size), strict=True):
            np.testing.assert_allclose(found, states(theirs, ids), atol=1e-5)
            assert hidden(ours, [ids], block_size)[0].tobytes() == found.tobytes()


def test_the_second_text_has_its_own_kind(tmp_path: Path) -> None:
    theirs, ours, ids = save_encoder(tmp_path, "Bert", "Model"), load(tmp_path), PROMPTS[4]
    found = hidden(ours, [ids[:20] + [token + 120 for token in ids[20:]]])[0]
    np.testing.assert_allclose(found, states(theirs, ids, [0] * 20 + [1] * 45), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Bert", {"num_labels": 3}),
        ("XLMRoberta", {"num_labels": 1}),
        ("JinaEmbeddingsV3", {"num_labels": 2}),
        ("ModernBert", {"num_labels": 2}),
        ("ModernBert", {"num_labels": 2, "classifier_pooling": "mean", "classifier_bias": True}),
    ],
)
def test_classifiers(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    theirs, ours = save_encoder(tmp_path, kind, "ForSequenceClassification", **settings), load(tmp_path)
    pooler = read_pooler(EngineConfig(), tmp_path, ours, ours.config)
    assert pooler.tasks == {"classify": settings["num_labels"]}
    for ids, found in zip(PROMPTS, hidden(ours, PROMPTS), strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([ids])).logits[0]
        right = logits.sigmoid() if settings["num_labels"] == 1 else logits.softmax(-1)
        pooled = found[0] if pooler.method == "cls" else found.mean(0, dtype=np.float64)
        (probs,) = pooler(pooled[None].astype(np.float64), PoolingParams(task="classify"))
        np.testing.assert_allclose(probs, right.numpy(), atol=1e-5)
        (raw,) = pooler(pooled[None].astype(np.float64), PoolingParams(task="classify", use_activation=False))
        np.testing.assert_allclose(raw, logits.numpy(), atol=1e-4)


def test_a_head_for_masked_words_and_old_names_of_norms(tmp_path: Path) -> None:
    """The first BERT checkpoints are of this kind."""
    from safetensors.numpy import load_file, save_file

    theirs = save_encoder(tmp_path, "Bert", "ForMaskedLM")
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    save_file({**renamed, "bert.embeddings.position_ids": np.arange(300)}, tmp_path / "model.safetensors")
    np.testing.assert_allclose(hidden(load(tmp_path), PROMPTS[:2])[1], states(theirs.bert, PROMPTS[1]), atol=1e-5)


def test_nomic_bert_with_the_settings_of_its_published_files(tmp_path: Path) -> None:
    theirs = save_encoder(tmp_path, "NomicBert", "Model")
    names = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "intermediate_size": "n_inner"}
    names |= {"num_hidden_layers": "n_layer", "max_position_embeddings": "max_trained_positions"}
    names |= {"layer_norm_eps": "layer_norm_epsilon"}
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    own = {names.get(name, name): value for name, value in settings.items()}
    del own["rope_parameters"], own["hidden_act"], own["head_dim"]
    own |= {"n_positions": 8192, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "activation_function": "swiglu"}
    file.write_text(json.dumps({**own, "prenorm": False, "qkv_proj_bias": False}))
    ours = load(tmp_path)
    assert ours.max_model_len == 300
    np.testing.assert_allclose(hidden(ours, PROMPTS[:2])[1], states(theirs, PROMPTS[1]), atol=1e-5)
    file.write_text(json.dumps({**own, "num_experts": 8}))
    with pytest.raises(UnsupportedModelError, match="num_experts=8"):
        load(tmp_path)


def test_modernbert_as_transformers_4_wrote_it(tmp_path: Path) -> None:
    theirs = save_encoder(tmp_path, "ModernBert", "Model")
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    for name in ("layer_types", "rope_parameters"):
        del values[name]
    values |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    file.write_text(json.dumps(values))
    np.testing.assert_allclose(hidden(load(tmp_path), PROMPTS[4:])[0], states(theirs, PROMPTS[4]), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"position_embedding_type": "relative_key"}, UnsupportedModelError, "position_embedding_type"),
        ({"hidden_act": "relu"}, UnsupportedModelError, "hidden_act"),
        ({"hidden_act": "silu"}, UnsupportedModelError, "hidden_act"),
        ({"is_decoder": True}, UnsupportedModelError, "is_decoder"),
        ({"num_attention_heads": 5}, ModelFileError, "hidden_size"),
        ({"architectures": ["BertForQuestionAnswering"]}, UnsupportedModelError, "architectures"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: dict[str, Any], error: type[Exception], text: str) -> None:
    values = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 48, "num_attention_heads": 4}
    values |= {"intermediate_size": 72, "num_hidden_layers": 1, "vocab_size": 120}
    (tmp_path / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(error, match=text):
        read_model_config(tmp_path)


def test_the_length_that_sentence_transformers_allows(tmp_path: Path) -> None:
    save_encoder(tmp_path, "Bert", "Model")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    assert load(tmp_path).max_model_len == 128


@pytest.mark.parametrize(
    ("older", "tokenizer", "most"),
    [
        (None, 32, 32),  # as sentence-transformers 6 saves it
        (None, 10**30, 512),  # no limit: the positions count
        (None, 4096, 512),
        (128, 32, 128),  # the older file has precedence, as in the library
    ],
)
def test_the_length_that_the_tokenizer_allows(tmp_path: Path, older: int | None, tokenizer: int, most: int) -> None:
    save_encoder(tmp_path, "Bert", "Model")
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 512}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": older}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": tokenizer}))
    assert read_model_config(tmp_path).max_position_embeddings == most


def test_the_length_of_a_decoder_that_embeds(tmp_path: Path) -> None:
    values = {"architectures": ["Qwen3Model"], "model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4}
    values |= {"intermediate_size": 72, "num_hidden_layers": 1, "vocab_size": 120, "num_key_value_heads": 2}
    values |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 32}))
    assert read_model_config(tmp_path).max_position_embeddings == 512
    (tmp_path / "modules.json").write_text("[]")
    assert read_model_config(tmp_path).max_position_embeddings == 32
