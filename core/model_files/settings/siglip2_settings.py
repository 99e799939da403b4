"""The settings of SigLIP 2's encoder for images of any size (LFM2-VL), in a model's config.json."""

import math
from typing import Any

from core.model_files.settings.values import GREY, Values, encoder_heads
from core.models.grid_parts import GridParts


def read_siglip2(values: Values, vision: Values, processor: Values) -> GridParts:
    """Return the encoder with these settings. values: of the whole model. processor: of PROCESSOR_FILE, empty if there
    is none.

    Errors: ModelFileError, UnsupportedModelError.
    """
    for place, name, only in (
        (values, "projector_hidden_act", "gelu"),
        (values, "projector_bias", True),
        (values, "vision_feature_layer", -1),
        (vision, "model_type", "siglip2_vision_model"),
        (vision, "hidden_act", "gelu_pytorch_tanh"),
        (vision, "num_channels", 3),
    ):
        if place.get(name) not in (None, only):
            place.refuse(name, f"only {only!r} is")
    heads = encoder_heads(vision, multiple=4)
    patch, merge = vision.integer("patch_size"), values.integer("downsample_factor", 2)
    count = vision.integer("num_patches")
    if (side := math.isqrt(count)) ** 2 != count:
        vision.fail("num_patches", f"must be a square number, got {count}")
    return siglip2_parts(
        hidden_size=vision.integer("hidden_size"),
        intermediate_size=vision.integer("intermediate_size"),
        num_hidden_layers=vision.integer("num_hidden_layers"),
        num_attention_heads=heads,
        patch_size=patch,
        merge_size=merge,
        max_rows=tile_rows(processor, patch * merge),
        norm_eps=vision.number("layer_norm_eps", 0.0, 1.0, 1e-6),
        positions_per_side=side,
        merger_size=values.integer("projector_hidden_size", 2560),
        normalizes_merged=values.boolean("projector_use_layernorm", True),
        image_mean=processor.colours("image_mean", GREY),
        image_std=processor.colours("image_std", GREY),
        rescale_factor=processor.number("rescale_factor", 1e-6, 1.0, 1 / 255),
    )


def siglip2_parts(**sizes: Any) -> GridParts:
    """Return the encoder with these sizes."""
    return GridParts(
        frames=1,
        is_centred=True,
        hidden_act="gelu_pytorch_tanh",
        is_gated=False,
        patch_bias=True,
        colours_last=True,
        rope_theta=0.0,
        averages_positions=True,
        split_qkv=True,
        turns_by_place=False,
        scales_at_once=True,
        **sizes,
    )


def tile_rows(processor: Values, unit: int) -> int:
    """Return the rows of the largest image: a whole one, or a square that a larger one is cut into.

    unit: pixels of a row's side. Errors: ModelFileError.
    """
    most = processor.integer("max_image_tokens", 256)
    if not processor.boolean("do_image_splitting", True):
        return most
    side = processor.integer("tile_size", 512)
    if side % unit:
        processor.fail("tile_size", f"must be a multiple of patch_size * downsample_factor = {unit}, got {side}")
    return int(max(most, (side // unit) ** 2))
