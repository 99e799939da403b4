"""GGUF files of tiny encoders, laid out by hand as llama.cpp's converter does it."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.core.models.encoder_checkpoints import WORDS

_CONTROL, _NORMAL = 3, 1
#: transformers' model types with rotary embedding -> llama.cpp's names.
ROTARY = {"nomic_bert": "nomic-bert", "jina_embeddings_v3": "jina-bert-v3"}


def pieces(words: list[str]) -> list[str]:
    """The words as the converter writes them: a space mark begins a word, and ## is left out."""
    return [word if word.startswith("[") else word[2:] if word.startswith("##") else f"\u2581{word}" for word in words]


def write_bert(
    path: Path, model: Any, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, **metadata: Any
) -> Path:
    """Write a transformers' encoder. metadata: keys behind the architecture's name, beside the converter's."""
    config = model.config
    architecture = ROTARY.get(config.model_type, "bert")
    writer = gguf.GGUFWriter(path, architecture)
    if config.model_type in ROTARY:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    for key, value in metadata.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"{architecture}.{key.replace('__', '.')}", value)
    words = [*WORDS, *(f"w{number}" for number in range(config.vocab_size - len(WORDS)))]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(pieces(words))
    writer.add_token_types([_CONTROL if word.startswith("[") else _NORMAL for word in words])
    for name, word in (("cls", "[CLS]"), ("seperator", "[SEP]"), ("unknown", "[UNK]"), ("padding", "[PAD]")):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", words.index(word))
    for name, tensor in converted(model, architecture).items():
        numbers = tensor.numpy().astype(np.float32)
        is_table = "position" in name or "token_type" in name
        if numbers.ndim > 1 and not is_table and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


#: Names of transformers' models with rotary embedding -> those of published files, which the converter reads.
_NOMIC = (
    ("embeddings.LayerNorm", "emb_ln"),
    ("layers.", "encoder.layers."),
    ("self_attn.qkv_proj", "attn.Wqkv"),
    ("self_attn.o_proj", "attn.out_proj"),
    ("gate_proj", "fc12"),
    ("up_proj", "fc11"),
    ("down_proj", "fc2"),
    ("post_attention_layernorm", "norm1"),
    ("post_mlp_layernorm", "norm2"),
)


def converted(model: Any, architecture: str) -> dict[str, Any]:
    """The model's tensors by the file's names."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    tensors = {name: one for name, one in model.state_dict().items() if not name.endswith("position_ids")}
    kinds = {"nomic_bert": ("weight",), "jina_embeddings_v3": ("weight", "bias")}.get(model.config.model_type, ())
    for layer in range(model.config.num_hidden_layers):
        for kind in kinds:
            parts = [tensors.pop(f"layers.{layer}.self_attn.{one}_proj.{kind}") for one in "qkv"]
            tensors[f"layers.{layer}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
    if model.config.model_type == "xlm-roberta":  # the rows before the first position's are left out
        table = "embeddings.position_embeddings.weight"
        tensors[table] = tensors[table][model.config.pad_token_id + 1 :]
    found = {}
    for name, tensor in tensors.items():
        if name.startswith("pooler."):
            continue
        stem, ending = name.rsplit(".", 1)
        if model.config.model_type in ROTARY:
            for theirs, own in _NOMIC:
                stem = stem.replace(theirs, own)
        found[f"{names.get_name(stem)}.{ending}"] = tensor
    return found
