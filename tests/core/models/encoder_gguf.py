"""GGUF files of tiny BERTs, laid out by hand as llama.cpp's converter does it."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.core.models.encoder_checkpoints import WORDS

_CONTROL, _NORMAL = 3, 1


def pieces(words: list[str]) -> list[str]:
    """The words as the converter writes them: a space mark begins a word, and ## is left out."""
    return [word if word.startswith("[") else word[2:] if word.startswith("##") else f"\u2581{word}" for word in words]


def write_bert(
    path: Path, model: Any, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, **metadata: Any
) -> Path:
    """Write a transformers' BertModel. metadata: keys behind "bert.", beside what the converter writes."""
    config, writer = model.config, gguf.GGUFWriter(path, "bert")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    for key, value in metadata.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"bert.{key.replace('__', '.')}", value)
    words = [*WORDS, *(f"w{number}" for number in range(config.vocab_size - len(WORDS)))]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(pieces(words))
    writer.add_token_types([_CONTROL if word.startswith("[") else _NORMAL for word in words])
    for name, word in (("cls", "[CLS]"), ("seperator", "[SEP]"), ("unknown", "[UNK]"), ("padding", "[PAD]")):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", words.index(word))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name.startswith("pooler.") or name.endswith("position_ids"):
            continue
        stem, ending = name.rsplit(".", 1)
        numbers = tensor.numpy().astype(np.float32)
        is_table = "position" in name or "token_type" in name
        if numbers.ndim > 1 and not is_table and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(f"{names.get_name(stem)}.{ending}", gguf.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{names.get_name(stem)}.{ending}", numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
