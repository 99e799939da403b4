"""The architectures with images as data: the model for their text, and how image embeddings join its tokens."""

import re

import msgspec

from core.models.vision_parts import VisionJoin


class VisionArchitecture(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of model with images. All use SigLIP's vision encoder, or one like it."""

    names: tuple[str, ...]  # in config.json's architectures
    gguf: str  # llama.cpp's name for the projector
    #: Of the model for text, a name of core.models.architectures.by_name; of several the first one.
    text_architecture: str
    text_type: str  # model_type of text_config; "": those of core/model_files/settings/text_part.py
    join: VisionJoin
    sees_whole: bool = False  # tokens of an image see each other
    finds_positions: bool = False  # a patch's position is found from its relative position in the image, as in Idefics3


VISION_ROWS = (
    VisionArchitecture(
        gguf="idefics3",
        names=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        text_architecture="LlamaForCausalLM",
        text_type="llama",
        join="shuffle",
        finds_positions=True,
    ),
    VisionArchitecture(
        gguf="gemma3",
        names=("Gemma3ForConditionalGeneration",),
        text_architecture="Gemma3ForCausalLM",
        text_type="gemma3_text",
        join="mean and norm",
        sees_whole=True,
    ),
    VisionArchitecture(
        gguf="internvl",
        names=("InternVLForConditionalGeneration",),
        text_architecture="Qwen2ForCausalLM",
        text_type="",
        join="norm and MLP",
    ),
)
#: By name in config.json's architectures.
VISION_ARCHITECTURES = {name: row for row in VISION_ROWS for name in row.names}
#: By llama.cpp's name for the projector.
GGUF_VISION = {row.gguf: row for row in VISION_ROWS}

_VISION = "vision."
#: Name prefixes in safetensors as written by transformers 4 and 5 -> ours. Weights of vision encoders get _VISION
#: before the name in vision_shapes().
_RENAMED = tuple(
    (re.compile(theirs), ours)
    for theirs, ours in (
        (r"(model\.)?vision_(model|tower)\.(vision_model\.)?", _VISION),
        (r"model\.connector\.modality_projection\.proj\.", f"{_VISION}connector."),
        (r"(model\.)?multi_modal_projector\.mm_input_projection_weight", f"{_VISION}connector.weight"),
        (r"(model\.)?multi_modal_projector\.mm_soft_emb_norm\.", f"{_VISION}connector_norm."),
        (r"(model\.)?multi_modal_projector\.layer_norm\.", f"{_VISION}connector_norm."),
        (r"(model\.)?multi_modal_projector\.linear_1\.", f"{_VISION}connector."),
        (r"(model\.)?multi_modal_projector\.linear_2\.", f"{_VISION}connector_out."),
        (r"model\.(text_model|language_model)\.|language_model\.model\.", "model."),
        (r"language_model\.lm_head\.", "lm_head."),
    )
)
_PARTS = (
    ("embeddings.patch_embedding.", "patches."),
    ("embeddings.position_embedding.", "positions."),
    ("post_layernorm.", "norm."),
    ("encoder.layers.", "layers."),
    (".layer_norm1.", ".attention_norm."),
    (".layer_norm2.", ".mlp_norm."),
    (".self_attn.q_proj.", ".q."),
    (".self_attn.k_proj.", ".k."),
    (".self_attn.v_proj.", ".v."),
    (".self_attn.out_proj.", ".o."),
    (".mlp.fc1.", ".up."),
    (".mlp.fc2.", ".down."),
    # InternVL's
    ("embeddings.patch_embeddings.projection.", "patches."),
    ("embeddings.position_embeddings", "positions.weight"),
    ("embeddings.cls_token", "first.weight"),
    ("encoder.layer.", "layers."),
    (".layernorm_before.", ".attention_norm."),
    (".layernorm_after.", ".mlp_norm."),
    *((f".attention.{name}_proj.", f".{name}.") for name in "qkv"),
    *((f".attention.{name}_norm.", f".{name}_norm.") for name in "qk"),
    (".attention.projection_layer.", ".o."),
    (".lambda_1", ".attention_scale.weight"),
    (".lambda_2", ".mlp_scale.weight"),
)
#: Weights of SigLIP's own pooling, which no supported model reads.
_UNUSED = f"{_VISION}head."


def vision_name(name: str) -> str | None:
    """Return the name in vision_shapes() for a weight's name in safetensors, or None for the text model's weights."""
    ours = _our_name(name)
    if not ours.startswith(_VISION):
        return None
    ours = ours.removeprefix(_VISION)
    for theirs, own in _PARTS:
        ours = ours.replace(theirs, own)
    return ours


def text_name(name: str) -> str | None:
    """Return our name for a text model's weight by its safetensors name, or None for the vision encoder's weights."""
    ours = _our_name(name)
    return None if ours.startswith(_VISION) else ours


def is_unused(name: str) -> bool:
    """Return whether the weight of this name in safetensors is not read, or only by the model for text."""
    ours = _our_name(name)
    return not ours.startswith(_VISION) or ours.startswith(_UNUSED)


def _our_name(name: str) -> str:
    for pattern, ours in _RENAMED:
        if found := pattern.match(name):
            return ours + name[found.end() :]
    return name
