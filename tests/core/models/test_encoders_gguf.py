"""Encoders in GGUF files: hidden states and texts are those of transformers; what is stored, and what is refused."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from core.model_files.model_config import read_model_config
from core.model_files.pooling import pools, read_pooler
from core.model_files.tensors.weights import load_weights
from core.models.encoder import Encoder
from core.models.operations.weight_form import WeightForm
from engine_core import LLM
from ipc.errors import EngineCoreError, ModelFileError, UnsupportedModelError
from ipc.options.config import EngineConfig
from kernels.cpu.library import load_cpu_library
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from tests.core.models.checkpoints import SIZES
from tests.core.models.encoder_checkpoints import add_tokenizer, save_encoder, states, unit
from tests.core.models.encoder_gguf import write_bert
from tests.core.models.gguf_checkpoints import write_model
from tests.core.models.test_encoders import PROMPTS, hidden
from tests.core.models.test_pooling_models import SMALL, hidden_states

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def load(path: Path, dtype: Dtype = FLOAT32) -> Encoder:
    config, library = read_model_config(path), load_cpu_library()
    return Encoder(config, load_weights(path, config, dtype, library), dtype, library)


@pytest.mark.parametrize("kind", ["Bert", "NomicBert", "XLMRoberta", "JinaEmbeddingsV3"])
def test_hidden_states_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """And the bits are those of the folder."""
    more = {"hidden_act": "gelu"} if kind == "XLMRoberta" else {}
    theirs, library = save_encoder(tmp_path, kind, "Model", **more), load_cpu_library()
    ours = load(write_bert(tmp_path / "a.gguf", theirs))
    assert (ours.max_model_len, ours.vocab_size) == (300, 120)
    for ids, found in zip(PROMPTS, hidden(ours, PROMPTS), strict=True):
        np.testing.assert_allclose(found, states(theirs, ids), atol=1e-5)
    config = read_model_config(tmp_path)
    folder = Encoder(config, load_weights(tmp_path, config, FLOAT32, library), FLOAT32, library)
    assert hidden(folder, PROMPTS[:2])[1].tobytes() == hidden(ours, PROMPTS[:2])[1].tobytes()


def test_quantized_matrices_give_the_bits_of_dequantized_ones(tmp_path: Path) -> None:
    theirs = save_encoder(tmp_path, "Bert", "Model", hidden_size=64, intermediate_size=96)
    path = write_bert(tmp_path / "a.gguf", theirs, Q8_0)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if weight.ndim > 1 and not any(word in name for word in ("position", "token_type", "pooler")):
                numbers = gguf.dequantize(gguf.quantize(weight.numpy(), Q8_0), Q8_0)
                weight.copy_(torch.tensor(numbers).bfloat16())
    theirs.save_pretrained(tmp_path)
    config, library = read_model_config(tmp_path), load_cpu_library()
    plain = Encoder(config, load_weights(tmp_path, config, BFLOAT16, library), BFLOAT16, library)
    expected = [one.tobytes() for one in hidden(plain, PROMPTS[1:4])]
    for form in (WeightForm.STORED, WeightForm.DENSE):
        config = read_model_config(path)
        ours = Encoder(config, load_weights(path, config, BFLOAT16, library), BFLOAT16, library, form=form)
        assert [one.tobytes() for one in hidden(ours, PROMPTS[1:4])] == expected


@pytest.mark.parametrize(("kind", "method"), [(None, "mean"), (0, "mean"), (1, "mean"), (2, "cls")])
def test_it_pools_as_the_file_says(tmp_path: Path, kind: int | None, method: str) -> None:
    metadata = {} if kind is None else {"pooling_type": kind}
    path = write_bert(tmp_path / "a.gguf", save_encoder(tmp_path, "Bert", "Model"), **metadata)
    assert pools(EngineConfig(), path, read_model_config(path))
    pooler = read_pooler(EngineConfig(), path, model := load(path), model.config)
    assert (pooler.method, pooler.is_whole) == (method, True)


WRONG: list[tuple[dict[str, Any], type[EngineCoreError], str]] = [
    ({"attention__causal": True}, UnsupportedModelError, "bert.attention.causal"),
    ({"attention__head_count": 5}, ModelFileError, "5"),
]


@pytest.mark.parametrize(("metadata", "error", "text"), WRONG)
def test_wrong_settings(tmp_path: Path, metadata: dict[str, Any], error: type[EngineCoreError], text: str) -> None:
    model = save_encoder(tmp_path, "Bert", "Model")
    key, value = next(iter(metadata.items()))
    path = write_bert(tmp_path / "a.gguf", model)
    data = path.read_bytes()
    name = f"bert.{key.replace('__', '.')}".encode()
    at = data.index(name) + len(name) + 4
    path.write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
    with pytest.raises(error, match=text):
        load(path)


def test_a_file_that_ranks_and_one_with_a_classifier_are_refused(tmp_path: Path) -> None:
    path = write_bert(tmp_path / "a.gguf", save_encoder(tmp_path, "Bert", "Model"), pooling_type=4)
    with pytest.raises(UnsupportedModelError, match="pooling_type 4"):
        read_pooler(EngineConfig(), path, model := load(path), model.config)


def test_texts_are_embedded_as_from_the_folder(tmp_path: Path) -> None:
    """The vocabulary in the file cuts texts as tokenizer.json does."""
    theirs = save_encoder(tmp_path, "Bert", "Model")
    add_tokenizer(tmp_path)
    path, texts = write_bert(tmp_path / "a.gguf", theirs, pooling_type=1), ["The sky is BLUE, today!", "ovens dailys q"]
    outputs = []
    for model in (str(path), str(tmp_path)):
        with LLM(model, dtype="float32", kv_cache_memory_bytes=1 << 24) as llm:
            outputs.append(llm.embed(texts, use_tqdm=False))
    for ours, other in zip(*outputs, strict=True):
        assert ours.prompt_token_ids == other.prompt_token_ids
        assert ours.outputs.embedding == other.outputs.embedding
        assert len(set(ours.prompt_token_ids)) > 4


def test_a_decoder_pools_where_its_file_names_a_pooling(tmp_path: Path) -> None:
    """Qwen3-Embedding's files do; a chat model's do not."""
    import transformers

    torch.manual_seed(3)
    config = transformers.Qwen3Config(**SIZES, head_dim=16, use_sliding_window=False)
    theirs = transformers.Qwen3ForCausalLM(config).eval().float()
    write_model(tmp_path / "chat.gguf", theirs, "qwen3")
    assert not pools(EngineConfig(), tmp_path / "chat.gguf", read_model_config(tmp_path / "chat.gguf"))
    write_model(tmp_path / "embed.gguf", theirs, "qwen3", lambda writer: writer.add_pooling_type(gguf.PoolingType.LAST))
    ids = list(range(3, 20))
    with LLM(str(tmp_path / "embed.gguf"), **SMALL) as llm:
        (output,) = llm.embed({"prompt_token_ids": ids}, use_tqdm=False)
    np.testing.assert_allclose(output.outputs.embedding, unit(hidden_states(theirs.model, ids)[-1]), atol=1e-5)
