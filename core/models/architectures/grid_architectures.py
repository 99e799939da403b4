"""The architectures whose images have any size, as data: their encoder, and the positions of image tokens."""

import re
from typing import Any, Literal

import msgspec

#: Encoders of Qwen's models, that of Gemma 4 (PooledParts), Pixtral's, which ends rows of an image, and SigLIP 2's.
GridForm = Literal["qwen", "pooled", "pixtral", "siglip2"]


class GridArchitecture(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of model with an encoder of patches in a grid (core/models/grid_parts.py)."""

    names: tuple[str, ...]  # in config.json's architectures
    gguf: str | None  # llama.cpp's name for the projector; None = files of it are not read
    form: GridForm = "qwen"  # of the settings, and of what follows from them
    width: str = "hidden_size"  # the setting of the encoder's width
    out_width: str = "out_hidden_size"  # the setting of the width of rows
    defaults: dict[str, Any]  # of vision_config's settings, from transformers' config classes
    is_centred: bool = True
    is_gated: bool = False
    patch_bias: bool = False
    windows: bool = False
    positions: bool = False  # a table of positions is stretched over the image
    deep: bool = False
    #: Default of mrope_section: pairs of a head that each position turns; None = an image's tokens have one position.
    sections: tuple[int, int, int] | None = None
    in_turn: bool = False  # the sections' pairs alternate; otherwise they follow each other
    plain_merger: bool = False  # see GridParts


_SIZES: dict[str, Any] = {"num_heads": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN2 = {**_SIZES, "depth": 32, "patch_size": 14}
_QWEN3 = {
    **_SIZES,
    "depth": 27,
    "patch_size": 16,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "hidden_act": "gelu_pytorch_tanh",
    "num_position_embeddings": 2304,
    "out_hidden_size": 3584,
}
_PIXTRAL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 1540,
    "hidden_act": "gelu",
}
_GEMMA4 = GridArchitecture(
    names=("Gemma4ForConditionalGeneration",),
    gguf="gemma4v",
    form="pooled",
    defaults={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "pooling_kernel_size": 3,
        "patch_size": 16,
        "position_embedding_size": 10_240,
    },
    is_centred=False,
    is_gated=True,
)
_QWEN3_VL = GridArchitecture(
    names=("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    gguf="qwen3vl_merger",
    defaults={**_QWEN3, "deepstack_visual_indexes": [8, 16, 24]},
    patch_bias=True,
    positions=True,
    deep=True,
    sections=(24, 20, 20),
    in_turn=True,
)
GRID_ROWS = (
    GridArchitecture(
        names=("Qwen2VLForConditionalGeneration",),
        gguf="qwen2vl_merger",
        width="embed_dim",
        out_width="hidden_size",
        defaults={**_QWEN2, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "hidden_act": "quick_gelu"},
        sections=(16, 24, 24),
        in_turn=False,
    ),
    GridArchitecture(
        names=("Qwen2_5_VLForConditionalGeneration",),
        gguf="qwen2.5vl_merger",
        defaults={
            **_QWEN2,
            "hidden_size": 3584,
            "intermediate_size": 3420,
            "out_hidden_size": 3584,
            "hidden_act": "silu",
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        is_centred=False,
        is_gated=True,
        windows=True,
        sections=(16, 24, 24),
        in_turn=False,
    ),
    _QWEN3_VL,
    msgspec.structs.replace(_QWEN3_VL, names=("Qwen3VLModel",), gguf=None),
    GridArchitecture(
        names=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        gguf="qwen3vl_merger",
        defaults=_QWEN3,
        patch_bias=True,
        positions=True,
        sections=(11, 11, 10),
        in_turn=True,
    ),
    _GEMMA4,
    msgspec.structs.replace(_GEMMA4, names=("EmbeddingGemma2Model",), gguf=None),
    GridArchitecture(
        names=("Mistral3ForConditionalGeneration",),
        gguf="pixtral",
        form="pixtral",
        defaults=_PIXTRAL,
        is_centred=False,
        is_gated=True,
    ),
    GridArchitecture(
        names=("LlavaForConditionalGeneration",),
        gguf="pixtral",
        form="pixtral",
        defaults={**_PIXTRAL, "patch_size": 16, "image_size": 1024},
        is_centred=False,
        is_gated=True,
        plain_merger=True,
    ),
    GridArchitecture(
        names=("Lfm2VlForConditionalGeneration",),
        gguf="lfm2",
        form="siglip2",
        defaults={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "patch_size": 16,
            "num_patches": 256,
        },
    ),
)
#: By name in config.json's architectures.
GRID_ARCHITECTURES = {name: row for row in GRID_ROWS for name in row.names}

_TOWER = r"vision_tower\.(?:vision_model\.)?|multi_modal_projector\.|(?=embed_vision\.)"
_VISION = re.compile(rf"(model\.)?(visual\.|{_TOWER})")
_UNUSED = "head."  # SigLIP's own pooling
#: Parts of names in safetensors -> ours, in this order.
_PARTS = (
    ("patch_embed.proj.", "patches."),
    ("pos_embed.", "positions."),
    ("blocks.", "layers."),
    (".norm1.", ".attention_norm."),
    (".norm2.", ".mlp_norm."),
    (".attn.qkv.", ".qkv."),
    (".attn.proj.", ".o."),
    (".mlp.fc1.", ".up."),
    (".mlp.fc2.", ".down."),
    (".mlp.linear_fc1.", ".up."),
    (".mlp.linear_fc2.", ".down."),
    (".mlp.gate_proj.", ".gate."),
    (".mlp.up_proj.", ".up."),
    (".mlp.down_proj.", ".down."),
    ("deepstack_merger_list.", "deep."),
    ("merger.ln_q.", "norm."),
    ("merger.norm.", "norm."),
    ("merger.mlp.0.", "merger.first."),
    ("merger.mlp.2.", "merger.second."),
    (".linear_fc1.", ".first."),
    (".linear_fc2.", ".second."),
)
_TOWER_PARTS = (
    ("embeddings.patch_embedding.", "patches."),
    ("embeddings.position_embedding.", "positions."),
    ("post_layernorm.", "norm."),
    (".layer_norm1.", ".attention_norm."),
    (".layer_norm2.", ".mlp_norm."),
    *((f".self_attn.{name}_proj.{kind}", f".{name}.{kind}") for name in "qkv" for kind in ("weight", "bias")),
    (".self_attn.out_proj.", ".o."),
    (".mlp.fc1.", ".up."),
    (".mlp.fc2.", ".down."),
    ("layer_norm.", "merger.norm."),
    ("patch_embedder.input_proj.", "patches."),
    ("patch_embedder.position_embedding_table", "positions.weight"),
    ("encoder.layers.", "layers."),
    ("_proj.linear.", "_proj."),
    ("std_bias", "standard.bias"),
    ("std_scale", "standard.weight"),
    ("embed_vision.embedding_projection.", "projection."),
    ("patch_conv.", "patches."),
    ("ln_pre.", "patch_norm."),
    ("transformer.layers.", "layers."),
    (".ffn_norm.", ".mlp_norm."),
    *((f".attention.{name}_proj.", f".{name}.") for name in "qkvo"),
    *((f".feed_forward.{name}_proj.", f".{name}.") for name in ("gate", "up", "down")),
    ("patch_merger.merging_layer.", "merger.merge."),
    ("linear_1.", "merger.first."),
    ("linear_2.", "merger.second."),
)


def grid_name(name: str) -> str | None:
    """Return the name in grid_shapes() for a weight's name in safetensors, or None for the text model's weights."""
    if not (found := _VISION.match(name)) or name[found.end() :].startswith(_UNUSED):
        return None
    ours = name[found.end() :]
    for theirs, own in _PARTS if found[2] == "visual." else _TOWER_PARTS:
        ours = ours.replace(theirs, own)
    return ours
