"""Writes a GGUF file of a published model's sizes with made-up weights: `python -m tests.make_shape NAME FILE`.

docs/performance/engines.md compares engines on such files: they take as long as the model's own, and their answers mean
nothing. The layout is that of tests/core/models/gguf_checkpoints.py. The vocabulary is the demo model's, filled up with
tokens that no text has. Sizes: those of the models' own configs, as transformers reads them.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoModelForCausalLM

from ipc.files.gguf import cut_gguf_metadata, parse_gguf_metadata
from ipc.files.model_files import resolve_model
from tests.core.models.gguf_checkpoints import converted, metadata

Array: TypeAlias = np.ndarray[Any, Any]

_STRIPE = 1 << 16  # blocks that are drawn; each matrix repeats them
_CONTEXT = 32_768
_DELTA = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248_320,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
}


def _every(number: int, last: str, others: str, layers: int) -> list[str]:
    return [others if (layer + 1) % number else last for layer in range(layers)]


class Shape(NamedTuple):
    """An architecture of llama.cpp's, transformers' model_type and sizes, and the types of matrices and of the head."""

    architecture: str
    model_type: str
    sizes: dict[str, Any]
    matrices: Type
    head: Type


SHAPES = {
    "qwen3.5-0.8b": Shape(
        "qwen35",
        "qwen3_5_text",
        {
            **_DELTA,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "intermediate_size": 3584,
            "num_attention_heads": 8,
            "linear_num_value_heads": 16,
            "tie_word_embeddings": True,
            "layer_types": _every(4, "full_attention", "linear_attention", 24),
        },
        Type.Q8_0,
        Type.Q8_0,
    ),
    "qwen3.5-35b-a3b-12-layers": Shape(
        "qwen35moe",
        "qwen3_5_moe_text",
        {
            **_DELTA,
            "hidden_size": 2048,
            "num_hidden_layers": 12,
            "intermediate_size": 512,  # nothing has it, and the converter writes it
            "num_attention_heads": 16,
            "linear_num_value_heads": 32,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
            "layer_types": _every(4, "full_attention", "linear_attention", 12),
        },
        Type.Q4_K,
        Type.Q6_K,
    ),
    "gemma-4-e4b": Shape(
        "gemma4",
        "gemma4_text",
        {
            "hidden_size": 2560,
            "num_hidden_layers": 42,
            "intermediate_size": 10_240,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": 512,
            "vocab_size": 262_144,
            "vocab_size_per_layer_input": 262_144,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 18,
            "final_logit_softcapping": 30.0,
            "layer_types": _every(6, "full_attention", "sliding_attention", 42),
        },
        Type.Q4_0,
        Type.Q4_0,
    ),
    "lfm2-1.2b": Shape(
        "lfm2",
        "lfm2",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 65_536,
            "block_ff_dim": 12_288,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention" if n in (2, 5, 8, 10, 12, 14) else "conv" for n in range(16)],
        },
        Type.Q8_0,
        Type.Q8_0,
    ),
}


def write_shape(shape: Shape, path: Path) -> None:
    """Write the file: the same bytes every time. Errors: OSError; ConfigError without the demo model."""
    config = AutoConfig.for_model(
        shape.model_type, max_position_embeddings=_CONTEXT, bos_token_id=1, eos_token_id=2, **shape.sizes
    )
    with torch.device("meta"):  # it has sizes and no numbers
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    writer = gguf.GGUFWriter(path, shape.architecture)
    metadata(writer, config)
    _add_vocabulary(writer, config.vocab_size)
    stripes: dict[tuple[Type, int], bytes] = {}
    contents: list[tuple[bytes, int]] = []
    rng = np.random.default_rng(0)
    for name, tensor in converted(model, shape.architecture).items():
        kind = shape.head if name == "output.weight" else shape.matrices
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if _is_matrix(name, tensor, block):
            depth = tensor.shape[-1]
            sizes = (*tensor.shape[:-1], depth // block * block_bytes)
            if (kind, depth) not in stripes:
                stripes[kind, depth] = _stripe(kind, depth, rng).tobytes()
            writer.add_tensor_info(name, sizes, np.dtype(np.uint8), int(np.prod(sizes)), kind)
            contents.append((stripes[kind, depth], int(np.prod(sizes))))
        else:
            numbers = _numbers(name, tensor, rng)
            writer.add_tensor_info(name, numbers.shape, numbers.dtype, numbers.nbytes)
            contents.append((numbers.tobytes(), numbers.nbytes))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    for data, size in contents:
        for piece in _pieces(data, size):
            file.write(piece)
        writer.write_padding(file, size)
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    demo: dict[str, Any] = parse_gguf_metadata(cut_gguf_metadata(resolve_model(None)))
    tokens, kinds = demo["tokenizer.ggml.tokens"][:size], demo["tokenizer.ggml.token_type"][:size]
    missing = size - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *(f"<pad{number}>" for number in range(missing))])
    writer.add_token_types([*kinds, *[gguf.TokenType.USER_DEFINED] * missing])
    writer.add_token_merges(demo["tokenizer.ggml.merges"])


def _is_matrix(name: str, tensor: torch.Tensor, block: int) -> bool:
    plain = ("conv", "norm", "ffn_gate_inp")  # what published files have in float32, of two dimensions too
    return tensor.dim() >= 2 and tensor.shape[-1] % block == 0 and not any(part in name for part in plain)


def _stripe(kind: Type, depth: int, rng: np.random.Generator) -> Array:
    """Return blocks whose numbers have a deviation of about 1 / sqrt(depth)."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks: Array = rng.integers(0, 256, (_STRIPE, size), np.uint8)
    deviation = depth**-0.5

    def put(begin: int, scale: float) -> None:
        blocks[:, begin : begin + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)

    if kind == Type.Q4_K:  # scales of 6 bits, 31 on average, and as large minima
        put(0, deviation / 4.6 / 31)
        put(2, deviation / 4.6 / 31 * 7.5)
    elif kind == Type.Q6_K:
        put(size - 2, deviation / 18 / 74)
    else:
        put(0, deviation / (74 if kind == Type.Q8_0 else 4.6))
    return blocks


def _numbers(name: str, tensor: torch.Tensor, rng: np.random.Generator) -> Array:
    """Return float32 numbers of a tensor that is not quantized, with which a model computes finite numbers."""
    shape = tuple(tensor.shape)
    if name == "rope_freqs.weight":
        values = tensor.numpy()  # the converter makes these
    elif name.endswith("ssm_a"):
        values = np.full(shape, -0.5)
    elif "norm" not in name and tensor.dim() >= 2:
        values = rng.standard_normal(shape) * shape[-1] ** -0.5
    elif "bias" in name:
        values = np.zeros(shape)
    else:
        values = np.ones(shape)
    return np.ascontiguousarray(values, np.float32)


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    for begin in range(0, size, len(data)):
        yield data[: size - begin]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    write_shape(SHAPES[arguments.name], arguments.file)
