"""Every in-tree architecture from GGUF files, laid out as llama.cpp's converter does it (gguf_checkpoints.py).

transformers' own GGUF reader confirms tensors and sizes; the logits are held against the model before its conversion.
A file decides settings and weights, which every arithmetic and the executor take as they are: so one computes the
logits, and a few cases are generated from. test_architectures.py has both of each model.
"""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from core.model_files.model_config import read_model_config
from core.model_files.tensors.weights import load_weights
from kernels.cpu.library import load_cpu_library
from kernels.elements import FLOAT32
from tests.core.models.checkpoints import CASES, check_greedy, check_logits, golden
from tests.core.models.gguf_checkpoints import GGUF_CASES, metadata, write, write_model
from tests.numbers import dense_tensor

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

#: transformers' reader knows no Llama biases, maps no llama file to Mistral names, and subtracts 1 from Gemma norms.
READ_BY_TRANSFORMERS = ("llama2", "llama3", "qwen2", "qwen3", "gemma3-scaled")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", GGUF_CASES)
def test_gguf_gives_what_transformers_gives(case: str, tmp_path: Path) -> None:
    expected = golden(case)
    path = write(tmp_path / "model.gguf", case, expected)
    check_logits(path, expected, libraries=(load_cpu_library(),))
    if case in READ_BY_TRANSFORMERS:
        check_greedy(path, expected)


def test_what_llama_4_files_do_not_state(tmp_path: Path) -> None:
    """Contexts end where chunks do, and where queries grow; heads are normalised unless there are 128 experts."""
    config = copy.deepcopy(golden("llama4").model.config)
    config.max_position_embeddings = 10**6
    for number in (16, 128):
        config.num_local_experts, path = number, tmp_path / f"{number}.gguf"
        writer = gguf.GGUFWriter(path, "llama4")
        metadata(writer, config)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        read = read_model_config(path)
        assert (read.max_position_embeddings, read.qk_norm, read.unrotated_layers) == (8191, number == 16, (3,))


def test_files_of_phi_2_may_have_q_k_and_v_in_one_matrix(tmp_path: Path) -> None:
    def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {name: one for name, one in tensors.items() if not re.search(r"attn_[qkv]\.", name)}
        for layer in range(3):
            for kind in ("weight", "bias"):
                parts = [tensors[f"blk.{layer}.attn_{one}.{kind}"] for one in "qkv"]
                kept[f"blk.{layer}.attn_qkv.{kind}"] = torch.cat(parts)
        return kept

    expected = golden("phi")
    path = write_model(tmp_path / "model.gguf", expected.model, "phi2", changed=fused)
    assert read_model_config(path).fused_qkv
    check_logits(path, expected)


def test_gpt2_has_a_table_of_positions(tmp_path: Path) -> None:
    expected, path = golden("gpt2"), tmp_path / "model.gguf"
    config, writer = expected.model.config, gguf.GGUFWriter(path, "gpt2")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
    for name, tensor in expected.model.state_dict().items():
        if name == "lm_head.weight":  # the embedding's
            continue
        is_turned = ".h." in name and tensor.dim() == 2
        stem, kind = name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", (tensor.T if is_turned else tensor).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check_logits(path, expected)


@pytest.mark.parametrize("case", READ_BY_TRANSFORMERS)
def test_tensors_are_those_of_transformers_gguf_reader(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
