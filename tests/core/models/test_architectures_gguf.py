"""Every in-tree architecture from GGUF files, laid out by hand as llama.cpp's converter does it.

Names come from the gguf package; the order of q and k rows, the norms' offset and the metadata are written out here.
transformers' own GGUF reader confirms tensors and sizes; the logits are held against the model before its conversion.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from core.model_files.model_config import read_model_config
from core.model_files.weights import load_weights
from kernels.elements import FLOAT32
from tests.core.models.checkpoints import CASES, Golden, check_greedy, check_logits, golden
from tests.numbers import dense_tensor

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

#: Case -> llama.cpp's name of its architecture.
GGUF_CASES = {
    "llama2": "llama",
    "llama3": "llama",
    "llama-biased-linear": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3-scaled": "gemma3",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Row i of a head's first half is followed by row i of its second half."""
    first, second = rows.view(heads, 2, -1, *rows.shape[1:]).unbind(1)
    return torch.stack((first, second), 2).reshape(rows.shape)


def converted(model: Any, architecture: str) -> dict[str, torch.Tensor]:
    config = model.config
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = interleaved(tensor, config.num_attention_heads if "q_" in name else config.num_key_value_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        stem, kind = name.rsplit(".", 1)
        tensors[f"{names.get_name(stem)}.{kind}"] = tensor
    if config.rope_parameters.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = divisors(config)
    return tensors


def divisors(config: Any) -> torch.Tensor:
    """What llama.cpp's converter makes of Llama 3's scaling."""
    rope, values = config.rope_parameters, []
    for index in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / config.head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        values.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(values)


def metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_name("no name")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    writer.add_uint32("tokenizer.ggml.eos_token_id", config.eos_token_id)
    rope = config.rope_parameters
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(2)
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def write(path: Path, case: str, expected: Golden) -> Path:
    writer = gguf.GGUFWriter(path, GGUF_CASES[case])
    metadata(writer, expected.model.config)
    for name, tensor in converted(expected.model, GGUF_CASES[case]).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", GGUF_CASES)
def test_gguf_gives_what_transformers_gives(case: str, tmp_path: Path) -> None:
    expected = golden(case)
    path = write(tmp_path / "model.gguf", case, expected)
    check_logits(path, expected)
    check_greedy(path, expected)


@pytest.mark.parametrize("case", [case for case in GGUF_CASES if case not in ("llama-biased-linear", "mistral")])
def test_tensors_are_those_of_transformers_gguf_reader(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader knows no Llama biases, maps no llama file to Mistral names, and subtracts 1 from Gemma norms."""
    from transformers import modeling_gguf_pytorch_utils

    monkeypatch.setattr(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **_: tensors)
    expected = golden(case)
    path = write(tmp_path / "model.gguf", case, expected)
    read: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    oracle = read(str(path), return_tensors=True, model_to_load=expected.model)
    config = read_model_config(path)
    for name in ("hidden_size", "num_key_value_heads", "rope_theta", "tie_word_embeddings", "vocab_size"):
        assert getattr(config, name) == oracle["config"][name], name
    tensors = oracle["tensors"]
    for name, weight in load_weights(path, config, FLOAT32):
        theirs, tensor = tensors.pop(name), dense_tensor(weight)
        offset = 1.0 if GGUF_CASES[case] == "gemma3" and name.endswith("norm.weight") else 0.0
        assert torch.equal(tensor - offset, theirs), name
    assert not tensors
    assert set(GGUF_CASES) <= set(CASES)
