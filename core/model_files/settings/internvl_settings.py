"""The settings of InternVL's vision encoder, in a model's config.json."""

import math
from typing import Any

from core.model_files.settings.values import Values, encoder_heads
from core.models.architectures.vision_architectures import VisionArchitecture
from core.models.vision_parts import VisionParts

#: From transformers' config class, for settings that vision_config may lack.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": 448,
    "patch_size": 14,
}
#: Settings of the whole model, and of vision_config, of which only one value is supported, or none given.
_ONLY = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu"}
_EPS = 1e-6  # of norms of Q and K, which no setting changes
_VISION_ONLY = {
    "hidden_act": "gelu",
    "use_mask_token": False,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
    "num_channels": 3,
}
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of transformers' processor


def read_internvl(values: Values, processor: Values, row: VisionArchitecture) -> VisionParts:
    """Return the encoder described by a config.json. processor: from PROCESSOR_FILE, empty if there is none.

    Errors: ModelFileError, UnsupportedModelError.
    """
    group = values.group("vision_config") or Values({}, values.source)
    vision = Values({**_DEFAULTS, **group.values}, values.source, prefix="vision_config.")
    for place, only in ((values, _ONLY), (vision, _VISION_ONLY)):
        for name, value in only.items():
            if place.get(name) not in (None, value):
                place.refuse(name, f"only {value!r} is")
    sizes: dict[str, Any] = {
        name: vision.integer(name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    }
    heads = encoder_heads(vision)
    qk_norms, eps = vision.boolean("use_qk_norm"), vision.number("layer_norm_eps", 0.0, 1.0, _EPS)
    if vision.get("norm_type") not in (None, "layer_norm", "rms_norm"):
        vision.refuse("norm_type", "'layer_norm' and 'rms_norm' are")
    if qk_norms and eps != _EPS:
        vision.refuse("layer_norm_eps", f"only {_EPS:g} is, with use_qk_norm=true")
    image, patch = _side(vision, "image_size"), _side(vision, "patch_size")
    factor = 1 / values.number("downsample_ratio", 1e-2, 1.0, 0.5)
    if not math.isclose(factor, round(factor)) or image % (patch * round(factor)):
        values.fail("downsample_ratio", f"must divide the {image // patch} patches of a side, got 1 / {factor:g}")
    return VisionParts(
        **sizes,
        num_attention_heads=heads,
        image_size=image,
        patch_size=patch,
        layer_norm_eps=eps,
        hidden_act="gelu",
        scale_factor=round(factor),
        join=row.join,
        finds_positions=row.finds_positions,
        sees_whole=row.sees_whole,
        image_mean=processor.colours("image_mean", _MEAN),
        image_std=processor.colours("image_std", _STD),
        rescale_factor=processor.number("rescale_factor", 1e-6, 1.0, 1 / 255),
        first_token=True,
        branch_scales=True,
        qkv_bias=vision.boolean("attention_bias"),
        rms_norms=vision.get("norm_type") == "rms_norm",
        qk_norms=qk_norms,
        final_norm=False,
    )


def _side(vision: Values, name: str) -> int:
    """Return the side of a square, which may be given as two equal numbers."""
    sides = vision.get(name)
    if isinstance(sides, list) and len(sides) == 2 and sides[0] == sides[1]:
        vision.values[name] = sides[0]
    return vision.integer(name)
