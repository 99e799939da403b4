"""Whole engines on files as they are published: a K-quantized GGUF file with a SentencePiece vocabulary, and a folder
of the Hub's cache without weights or tokenizer."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub import constants

from core.model_files.model_config import read_model_config
from core.model_files.tensors.weight_shapes import expected_shapes
from core.model_files.tensors.weights import load_weights
from frontend.llm import LLM
from ipc.errors import InvalidRequestError
from ipc.params.sampling_params import SamplingParams
from kernels.elements import FLOAT32
from tests.frontend.text.sentencepiece_vocabulary import sentencepiece_metadata
from tests.kernels.block_scales import set_scales
from tests.numbers import dense_tensor
from tools.lab.bench.tiny_model import write_tiny_model

HIDDEN = 256  # weights in a K block
LAYERS = 2
#: As llama.cpp's Q4_K_M mixes them, and types with levels and with a grid.
TYPES = {"attn_q": "Q4_K", "attn_k": "IQ4_XS", "attn_v": "Q6_K", "attn_output": "Q5_0", "ffn_gate": "IQ3_S",
         "ffn_up": "Q5_1", "ffn_down": "Q3_K", "token_embd": "Q6_K"}  # fmt: skip


def random_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Rows of blocks whose weights are between -0.1 and 0.1 or so; the gguf package quantizes the legacy types only."""
    stored = gguf.GGMLQuantizationType[kind]
    if kind in ("Q5_0", "Q5_1"):
        return gguf.quantize(rng.normal(0, 0.05, shape).astype(np.float32), stored)
    weights, size = gguf.GGML_QUANT_SIZES[stored]
    blocks = rng.integers(0, 256, (np.prod(shape) // weights, size), dtype=np.uint8)
    # Scales times numbers are at most 63 * 15, 32 * 127, 31 * 15, 32 * 4 and 128 * 32.
    scales = {"Q4_K": [1e-4, 8e-4], "IQ4_XS": [2e-5], "IQ3_S": [2e-4], "Q3_K": [8e-4], "Q6_K": [2e-5]}
    set_scales(blocks, kind, scales[kind])
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(path: Path) -> Path:
    rng = np.random.default_rng(0)
    metadata = sentencepiece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(metadata["tokenizer.ggml.scores"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    shapes = {"token_embd": (len(tokens), HIDDEN)}
    shapes |= {f"blk.{i}.{name}": (HIDDEN, HIDDEN) for i in range(LAYERS) for name in TYPES if name != "token_embd"}
    for name, shape in shapes.items():
        kind = TYPES[name.rpartition(".")[2]]
        writer.add_tensor(f"{name}.weight", random_blocks(kind, shape, rng), raw_dtype=gguf.GGMLQuantizationType[kind])
    for name in ("output_norm", *(f"blk.{i}.{norm}" for i in range(LAYERS) for norm in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


def test_every_tensor_equals_the_gguf_packages_reading(quantized: Path) -> None:
    config = read_model_config(quantized)
    found = {name: dense_tensor(weight) for name, weight in load_weights(quantized, config, FLOAT32)}
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected_shapes(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(quantized).tensors}
    for name, weights in found.items():
        tensor = stored[names.get_name(name, try_suffixes=(".weight",))]
        expected = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)).view(weights.shape)
        if "q_proj" in name or "k_proj" in name:  # rows 0, 2, 4, ... of a head come first, then 1, 3, 5, ...
            expected = expected.view(4, -1, 2, HIDDEN).transpose(1, 2).reshape(weights.shape)
        assert torch.equal(weights, expected), name
        assert weights.abs().max() < 1.5, name


def test_text_in_text_out(quantized: Path) -> None:
    prompts = ["Hello, world!", "the fox 你好 👋"]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(model=str(quantized), dtype="float32", threads=1, kv_cache_memory_bytes=1 << 24) as llm:
        tokenizer = llm.get_tokenizer()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        chat = llm.chat([{"role": "user", "content": "the fox"}], params, use_tqdm=False)[0]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True) == prompt
        assert output.prompt_token_ids[0] == 1
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
        assert len(output.outputs[0].token_ids) == 12
    assert chat.prompt_token_ids == tokenizer.encode("the fox")


def test_dummy_weights_of_a_hugging_face_name_without_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("c" * 40)
    write_tiny_model(snapshot)
    (snapshot / "model.safetensors").unlink()
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("c" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with LLM(model="org/tiny", load_format="dummy", threads=1, kv_cache_memory_bytes=1 << 24) as llm:
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        output = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)[0]
        with pytest.raises(InvalidRequestError, match="this engine has no tokenizer: give token ids"):
            llm.generate("text", params, use_tqdm=False)
        welcome = llm.client.welcome
    assert len(output.outputs[0].token_ids) == 5
    assert output.outputs[0].text == ""
    assert welcome.model_name == "org/tiny"
    assert welcome.model_fingerprint.startswith("dummy-")
