"""The linear layers that adapters may change, by their names in an adapter's files (core/adapters/file_matrix.py)."""

from collections.abc import Callable, Mapping

import numpy as np

from core.adapters.file_matrix import FileMatrix, FilePart
from core.model_files.tensors.adapted_encoder import encoder_peft_layers
from core.model_files.tensors.adapted_recurrent import recurrent_file_parts
from core.model_files.tensors.tensor_names import gates_last, gguf_name, head_order, json_name, parts_in_turn
from core.models.architectures.by_name import ARCHITECTURES
from core.models.config import ModelConfig
from ipc.tables.arrays import Ints

_Parts = dict[str, tuple[FilePart, ...]]

#: What replaces "model." in the names of a model with images, in current and earlier versions of transformers.
_TEXT_STEMS = ("model.language_model.", "language_model.model.", "model.text_model.")
_GATES = ("self_attn.g_proj",)
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def peft_layers(config: ModelConfig) -> dict[str, FileMatrix]:
    """Return the layers in PEFT's files, which have transformers' order and names.

    These are a checkpoint's names, except for a model that transformers runs with Llama's code (EXAONE 3): its names
    are Llama's, like ours. Models with images have the names of their text model, with another prefix.
    """
    if config.encoder is not None:
        return encoder_peft_layers(config)
    row = ARCHITECTURES[config.architecture]
    attention = _attention(config, row.interleaves_heads, is_fused=row.fused_qkv, by_kv_heads=row.qkv_by_kv_heads)
    parts = attention | _mlp(config, is_fused=row.fused_gate_up)
    if config.recurrent is not None:
        parts |= recurrent_file_parts(config, row.delta_inputs, file_turns=False)
    parts = _multiplied(parts, config)

    def name_in_code(name: str, config: ModelConfig) -> str:  # a file's layers may be halves of ours
        return json_name(name, config).replace(row.layers_name, "model.layers", 1) if config.file_layers else name

    found = _of_all_layers(parts, config, name_in_code) | _of_all_layers(parts, config, json_name)
    layers = [(name.removeprefix("model."), layer) for name, layer in found.items() if name.startswith("model.layers.")]
    return found | {stem + name: layer for stem in _TEXT_STEMS for name, layer in layers}


def gguf_layers(config: ModelConfig) -> dict[str, FileMatrix]:
    """Return the layers in GGUF files. Adapters of encoders have none."""
    if config.encoder is not None:
        return {}
    row = ARCHITECTURES[config.architecture]
    interleaves = row.interleaves_heads or row.gguf_interleaves_heads
    # llama.cpp's converter splits Q, K and V if it interleaves rows.
    attention = _attention(config, interleaves, is_fused=row.fused_qkv and not row.gguf_interleaves_heads)
    parts = attention | _mlp(config, is_fused=row.fused_gate_up)
    if (own := config.recurrent) is not None:
        turns = row.gguf_heads_take_turns and own.num_heads != own.num_groups
        parts |= recurrent_file_parts(config, row.gguf_delta_inputs, file_turns=turns)
    return _of_all_layers(parts, config, gguf_name)


def _attention(config: ModelConfig, interleaves: bool, *, is_fused: bool, by_kv_heads: bool = False) -> _Parts:
    """Return the parts of the layers for one layer's attention. interleaves: see head_order().

    by_kv_heads: a fused layer has each KV head's queries, K and V together.
    """
    size, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    order = head_order(size, config.rotary_dim or size, interleaves=interleaves)
    output: _Parts = {name: (FilePart(name),) for name in ("self_attn.o_proj", *_GATES[: config.head_gates])}
    if config.output_gate:
        queries, gates = np.split(np.array(gates_last(order, heads), np.int64), 2)
        output["self_attn.q_proj"] = FilePart("self_attn.q_proj", queries), FilePart("self_attn.q_gate", gates)
    if by_kv_heads:
        rows = np.array(parts_in_turn(order, heads, kv_heads), np.int64)
    else:
        places = np.array(order, np.int64)
        turned = [head * size + places for head in range(heads + kv_heads)]
        rows = np.concatenate([*turned, (heads + kv_heads) * size + np.arange(kv_heads * size)])
    queries, keys, values = np.split(rows, [heads * size, (heads + kv_heads) * size])
    if is_fused:
        parts = zip(_QKV, (queries, keys, values), strict=True)
        return output | {"self_attn.qkv_proj": tuple(FilePart(name, own) for name, own in parts)}
    q, k, v = _QKV
    output[k], output[v] = (_whole(k, keys - heads * size),), (FilePart(v),)
    output.setdefault(q, (_whole(q, queries),))
    return output


def _multiplied(parts: _Parts, config: ModelConfig) -> _Parts:
    """Return the parts with the factors of the model's products."""
    factors = {
        part: np.repeat(np.array([factor for _, factor in runs], np.float32), [count for count, _ in runs])
        for part, runs in config.factors
    }
    return {name: tuple(one._replace(factors=factors.get(one.name)) for one in each) for name, each in parts.items()}


def _whole(name: str, rows: Ints) -> FilePart:
    return FilePart(name, None if np.array_equal(rows, np.arange(len(rows))) else rows)


def _mlp(config: ModelConfig, *, is_fused: bool) -> _Parts:
    names, size = ("mlp.gate_proj", "mlp.up_proj") if config.is_gated else ("mlp.up_proj",), config.intermediate_size
    down: _Parts = {"mlp.down_proj": (FilePart("mlp.down_proj"),)}
    if not is_fused:
        down.update({name: (FilePart(name),) for name in names})
        return down
    rows = np.split(np.arange(len(names) * size), len(names))
    return down | {"mlp.gate_up_proj": tuple(FilePart(name, own) for name, own in zip(names, rows, strict=True))}


def _of_all_layers(
    parts: Mapping[str, tuple[FilePart, ...]], config: ModelConfig, file_name: Callable[[str, ModelConfig], str]
) -> dict[str, FileMatrix]:
    """Return the layers by file_name(our name of a weight). parts: for those of one layer, by our name."""
    found: dict[str, FileMatrix] = {}
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        for name, each in parts.items():
            if name.startswith("mlp.") and not config.has_dense_mlp(index):
                continue
            if name.startswith("self_attn." if index in config.recurrent_layers else "mixer."):
                continue
            num_rows = sum(len(part.rows) for part in each if part.rows is not None)
            own = tuple(part._replace(name=prefix + part.name) for part in each)
            found[file_name(f"{prefix}{name}.weight", config).removesuffix(".weight")] = FileMatrix(own, num_rows)
    return found
