"""The vision settings in a model's config.json: which models have a vision encoder, and its sizes."""

import math
from typing import Any, get_args

from core.model_files.settings.text_part import SHARED, text_part
from core.model_files.settings.values import GREY, Values, encoder_heads
from core.models.architectures.vision_architectures import VISION_ARCHITECTURES, VisionArchitecture
from core.models.vision_parts import VisionActivation, VisionParts

#: Defaults from transformers' config classes for settings that vision_config and text_config may lack, by the join and
#: by model_type.
_VISION_DEFAULTS: dict[str, dict[str, Any]] = {
    "shuffle": {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32},
    "mean and norm": {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16},
}
_DEFAULTS: dict[str, Any] = {
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "image_size": 224,
    "hidden_act": "gelu_pytorch_tanh",
}
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-5},
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
    },
}


def vision_architecture(values: Values) -> VisionArchitecture | None:
    """Return the architecture with images that a config.json names, or None."""
    names = values.get("architectures")
    return VISION_ARCHITECTURES.get(str(names[0])) if isinstance(names, list) and len(names) == 1 else None


def text_values(values: Values, row: VisionArchitecture) -> Values:
    """Return the settings of the text model. Errors: ModelFileError, UnsupportedModelError."""
    if (part := text_part(values)) is not None:
        return part
    text = values.group("text_config")
    if text is None:
        values.fail("text_config", "is missing; expected the settings of the text model")
    if text.get("model_type") not in (None, row.text_type):
        text.refuse("model_type", f"{row.text_type!r} is")
    own: dict[str, Any] = {"architectures": [row.text_architecture]}
    for name in SHARED:
        if text.get(name) is None and values.get(name) is not None:
            own[name] = values.get(name)
    if values.get("tie_word_embeddings") is not None or row.join == "shuffle":
        own["tie_word_embeddings"] = values.boolean("tie_word_embeddings")
    if text.boolean("qk_layer_norms"):
        text.refuse("qk_layer_norms", "only false is")
    text.values = {**_TEXT_DEFAULTS[row.text_type], **text.values, **own}
    return text


def read_vision(values: Values, processor: Values, row: VisionArchitecture) -> VisionParts:
    """Return the vision encoder described by a config.json. processor: from PROCESSOR_FILE, empty if there is none.

    Errors: ModelFileError, UnsupportedModelError.
    """
    group = values.group("vision_config") or Values({}, values.source)
    defaults = {**_DEFAULTS, **_VISION_DEFAULTS[row.join]}
    vision = Values({**defaults, **group.values}, values.source, prefix="vision_config.")
    if vision.get("hidden_act") not in get_args(VisionActivation):
        vision.refuse("hidden_act", f"{' and '.join(map(repr, get_args(VisionActivation)))} are")
    if vision.get("num_channels") not in (None, 3):
        vision.refuse("num_channels", "3 is")
    sizes: dict[str, Any] = {
        name: vision.integer(name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    }
    heads = encoder_heads(vision)
    image, patch = vision.integer("image_size"), vision.integer("patch_size")
    factor = _factor(values, image // patch) if row.join == "mean and norm" else values.integer("scale_factor", 2)
    if image % patch or (image // patch) % factor:
        vision.fail("image_size", f"must be a multiple of patch_size * scale_factor = {patch * factor}, got {image}")
    return VisionParts(
        **sizes,
        num_attention_heads=heads,
        image_size=image,
        patch_size=patch,
        layer_norm_eps=vision.number("layer_norm_eps", 0.0, 1.0, 1e-6),
        hidden_act=vision.get("hidden_act"),
        scale_factor=factor,
        join=row.join,
        finds_positions=row.finds_positions,
        sees_whole=row.sees_whole,
        image_mean=processor.colours("image_mean", GREY),
        image_std=processor.colours("image_std", GREY),
        rescale_factor=processor.number("rescale_factor", 1e-6, 1.0, 1 / 255),
    )


def _factor(values: Values, side: int) -> int:
    """Return how many patches in each direction become one of an image's mm_tokens_per_image tokens."""
    count = values.integer("mm_tokens_per_image", 256)
    tokens_per_side = math.isqrt(count)
    if tokens_per_side**2 != count or not side or side % tokens_per_side:
        expected = f"must be a square number whose root divides the {side} patches of an image's side"
        values.fail("mm_tokens_per_image", f"{expected}, got {count}")
    return side // tokens_per_side
