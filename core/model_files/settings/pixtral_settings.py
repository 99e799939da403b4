"""The settings of Pixtral's encoder (Mistral Small 3, Ministral 3), in a model's config.json."""

from typing import Any

from core.model_files.settings.values import Values, encoder_heads
from core.models.config import ModelConfig
from core.models.grid_parts import GridParts
from ipc.wire.feature_messages import MAX_IMAGE_PIXELS

#: The defaults of transformers' processor.
_MEAN, _STD, _LONGEST = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), 1024
_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu")


def read_pixtral(
    values: Values, vision: Values, processor: Values, text: ModelConfig, *, plain_merger: bool = False
) -> GridParts:
    """Return the encoder with these settings. values: of the whole model. processor: of PROCESSOR_FILE, empty if there
    is none. plain_merger: see GridParts.

    Errors: ModelFileError, UnsupportedModelError.
    """
    for name, only in (("vision_feature_layer", -1), ("projector_hidden_act", "gelu")):
        if values.get(name) not in (None, only):
            values.refuse(name, f"only {only!r} is")
    if values.boolean("multimodal_projector_bias", plain_merger) != plain_merger:
        values.refuse("multimodal_projector_bias", f"only {str(plain_merger).lower()} is")
    if vision.get("model_type") not in (None, "pixtral"):
        vision.refuse("model_type", "'pixtral' is")
    if plain_merger and values.get("vision_feature_select_strategy") not in (None, "full"):
        values.refuse("vision_feature_select_strategy", "'full' is")
    if vision.get("hidden_act") not in _ACTIVATIONS:
        vision.refuse("hidden_act", f"{', '.join(map(repr, _ACTIVATIONS))} are")
    if vision.get("num_channels") not in (None, 3):
        vision.refuse("num_channels", "3 is")
    width, heads = vision.integer("hidden_size"), encoder_heads(vision, multiple=4)
    if vision.get("head_dim") not in (None, width // heads):
        vision.refuse("head_dim", f"hidden_size / num_attention_heads = {width // heads} is")
    patch, merge = vision.integer("patch_size"), 1 if plain_merger else values.integer("spatial_merge_size", 2)
    return pixtral_parts(
        hidden_size=width,
        intermediate_size=vision.integer("intermediate_size"),
        num_hidden_layers=vision.integer("num_hidden_layers"),
        num_attention_heads=heads,
        patch_size=patch,
        merge_size=merge,
        max_rows=most_rows(_longest(processor), patch * merge),
        hidden_act=vision.get("hidden_act"),
        rope_theta=_theta(vision),
        merge_first=not plain_merger,
        plain_merger=plain_merger,
        merger_eps=None if plain_merger else text.rms_norm_eps,
        image_mean=processor.colours("image_mean", _MEAN),
        image_std=processor.colours("image_std", _STD),
        rescale_factor=processor.number("rescale_factor", 1e-6, 1.0, 1 / 255),
    )


def pixtral_parts(**sizes: Any) -> GridParts:
    """Return the encoder with these sizes."""
    return GridParts(
        frames=1,
        norm_eps=1e-5,
        is_centred=False,
        is_gated=True,
        patch_bias=False,
        has_biases=False,
        patch_norm=True,
        alternates=True,
        split_qkv=True,
        breaks_rows=True,
        turns_by_place=False,
        **sizes,
    )


def most_rows(longest: int, unit: int) -> int:
    """Return the rows of the largest image whose sides have at most `longest` pixels, and that is accepted.

    unit: side of the pixels that become a row.
    """
    side = max(1, min(-(-longest // unit), int(MAX_IMAGE_PIXELS**0.5) // unit))
    return side * (side + 1) - 1 or 1


def _longest(processor: Values) -> int:
    size: Any = processor.get("size") or {"longest_edge": _LONGEST}
    longest = size.get("longest_edge") if isinstance(size, dict) else None
    if type(longest) is not int or not 1 <= longest <= 1 << 14:
        processor.fail("size", f"must have the longest side of an image as longest_edge, got {size!r:.80}")
    return int(longest)


def _theta(vision: Values) -> float:
    rope = vision.get("rope_parameters")
    theta: Any = rope.get("rope_theta") if isinstance(rope, dict) else vision.get("rope_theta")
    theta = 10_000.0 if theta is None else theta
    if type(theta) not in (int, float) or not 1 <= theta <= 1e12:
        vision.fail("rope_parameters", f"must have a number as rope_theta, got {theta!r:.80}")
    return float(theta)
