"""The names of tensors in safetensors and GGUF files, and the order of the rows of Q and K in them."""

import re
from collections.abc import Mapping

from core.model_files.tensors.encoder_weights import encoder_gguf_name
from core.models.architectures.by_name import ARCHITECTURES
from core.models.config import ModelConfig

#: Numbered parts: matrices of experts, those of heads in latent attention, and per-head norms.
_NUMBERED = re.compile(r"(mlp\.experts|self_attn\.heads)\.(\d{1,6})\.(\w+)")
_KEYS_AND_VALUES = re.compile(
    r"(?:model\.layers|blk)\.(\d{1,6})\.(?:self_attn\.(?:[kv]_proj|k_norm)|attn_(?:[kv]|k_norm))\.(?:weight|bias)"
)
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.embed_positions": "position_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.stream_projections": "altup_proj",
    "model.stream_outputs": "altup_unembd_proj",
}
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.heads.*.q_norm": "attn_q_norm.*",
    "self_attn.heads.*.k_norm": "attn_k_norm.*",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
#: Names of norms in models with post_norms. They replace those above.
_GGUF_POST_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def head_order(head_dim: int, rotary_dim: int, *, interleaves: bool) -> tuple[int, ...]:
    """Return, for each number of a head of Q and K in the kernels' order, its position in the file.

    The kernels rotate number i with number i + head_dim / 2. In a file, the rotary_dim leading numbers are rotated, and
    the two numbers of a pair are half of rotary_dim apart, or adjacent (interleaves). The others are not rotated, and
    become pairs with an angle of 0.
    """
    half = rotary_dim // 2
    rotated = range(rotary_dim)
    firsts, seconds = (rotated[::2], rotated[1::2]) if interleaves else (rotated[:half], rotated[half:])
    others = range(rotary_dim, head_dim)
    middle = len(others) // 2
    return (*firsts, *others[:middle], *seconds, *others[middle:])


def gates_last(order: tuple[int, ...], num_heads: int) -> tuple[int, ...]:
    """Return the positions in the file of all rows of queries, then of all rows of their gates.

    In the file the queries and gates of each head follow each other. order: of a head's queries, see head_order().
    """
    size = len(order)
    queries = (2 * head * size + place for head in range(num_heads) for place in order)
    gates = (2 * head * size + size + place for head in range(num_heads) for place in range(size))
    return (*queries, *gates)


def parts_in_turn(order: tuple[int, ...], num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Return the positions in the file of all rows of Q, then of K, then of V, which are stored KV head by KV head.

    order: of a head of Q or K, see head_order().
    """
    size, group = len(order), num_heads // num_kv_heads
    firsts = [kv_head * (group + 2) * size for kv_head in range(num_kv_heads)]
    queries = (first + head * size + place for first in firsts for head in range(group) for place in order)
    keys = (first + group * size + place for first in firsts for place in order)
    values = (first + (group + 1) * size + place for first in firsts for place in range(size))
    return (*queries, *keys, *values)


def json_name(name: str, config: ModelConfig) -> str:
    """Return the name in safetensors for one of our names."""
    if config.encoder is not None:
        return name
    stem, kind = name.rsplit(".", 1)  # kind: weight or bias
    row = ARCHITECTURES[config.architecture]
    names = row.names
    if not name.startswith("model.layers."):
        base, number = _numbered(stem)
        return f"{names.get(base, base)}{number}.{kind}"
    layer, part = _place(stem, config)
    return f"{row.layers_name}.{layer}.{_part_name(part, names)}.{kind}"


def gguf_name(name: str, config: ModelConfig) -> str:
    """Return the name in GGUF files for one of our names."""
    if config.encoder is not None:
        return encoder_gguf_name(name, config)
    stem, kind = name.rsplit(".", 1)  # kind: weight or bias
    own = ARCHITECTURES[config.architecture].gguf_names
    base, number = _numbered(stem)
    if base in _GGUF_NAMES:
        return f"{own.get(base, _GGUF_NAMES[base])}{number}.{kind}"
    layer, part = _place(stem, config)
    names = _GGUF_LAYER_NAMES | (_GGUF_POST_NORM_NAMES if config.post_norms else {})
    names |= own
    return f"blk.{layer}.{_part_name(part, names)}.{kind}"


def _numbered(stem: str) -> tuple[str, str]:
    """Return the name of a matrix outside the layers, and its number among several with the dot before it, or ""."""
    base, dot, number = stem.rpartition(".")
    return (base, dot + number) if number.isdecimal() else (stem, "")


def _place(stem: str, config: ModelConfig) -> tuple[str, str]:
    """Return the number in files of the layer with this tensor, and the tensor's name in the layer."""
    _, _, layer, part = stem.split(".", 3)
    if config.file_layers:
        own = config.file_layers[int(layer)]
        layer = str(own[part.startswith(("post_attention_layernorm", "mlp."))])
    return layer, part


def is_of_further_layer(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor in a file belongs to a layer after the last one, which this architecture may have."""
    if config.encoder is not None:
        return False
    row = ARCHITECTURES[config.architecture]
    if not (row.may_predict if name.startswith("blk.") else row.further_layers):
        return False
    match = re.match(r"(?:model\.layers|blk)\.(\d{1,6})\.", name)
    num_layers = max(map(max, config.file_layers)) + 1 if config.file_layers else config.num_hidden_layers
    return name.startswith(("model.mtp_", "mtp.")) or (match is not None and int(match[1]) >= num_layers)


def is_of_shared_layer(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor of a file is of K or V in a layer that reads those of another one."""
    match = _KEYS_AND_VALUES.fullmatch(name)
    return match is not None and int(match[1]) >= config.num_hidden_layers - config.num_shared_layers


def _part_name(part: str, names: Mapping[str, str]) -> str:
    """Return the file's name for a part of a layer. A part without one keeps its name."""
    if (match := _NUMBERED.fullmatch(part)) is None:
        return names.get(part, part)
    pattern = f"{match[1]}.*.{match[3]}"
    return names.get(pattern, pattern).replace("*", match[2])
