"""The settings of encoders for images of any size in a model's config.json, and of the positions of image tokens."""

import math
from typing import Any, get_args

from core.model_files.settings.values import Values, encoder_heads
from core.models.architectures.grid_architectures import GRID_ARCHITECTURES, GridArchitecture
from core.models.config import ModelConfig
from core.models.grid_parts import GridActivation, GridParts
from ipc.wire.feature_messages import MAX_IMAGE_PIXELS

#: The defaults of transformers' processor, which are CLIP's.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def grid_architecture(values: Values) -> GridArchitecture | None:
    """Return the architecture with images of any size that a config.json names, or None."""
    names = values.get("architectures")
    return GRID_ARCHITECTURES.get(str(names[0])) if isinstance(names, list) and len(names) == 1 else None


def grid_values(values: Values, row: GridArchitecture) -> Values | None:
    """Return the settings of the encoder, or None if the file has none: then the model takes no images."""
    group = values.group("vision_config")
    return None if group is None else Values({**row.defaults, **group.values}, values.source, prefix="vision_config.")


def read_grid(vision: Values, processor: Values, row: GridArchitecture, text: ModelConfig) -> GridParts:
    """Return the encoder with these settings. processor: of PROCESSOR_FILE, empty if there is none.

    Errors: ModelFileError, UnsupportedModelError.
    """
    without = "quick_gelu" if row.is_gated else "silu"  # no kernel
    activations = [one for one in get_args(GridActivation) if one != without]
    if vision.get("hidden_act") not in activations:
        vision.refuse("hidden_act", f"{', '.join(map(repr, activations))} are")
    if vision.get("in_channels") not in (None, 3):
        vision.refuse("in_channels", "3 is")
    if vision.get("in_chans") not in (None, 3):
        vision.refuse("in_chans", "3 is")
    width, heads = vision.integer(row.width), encoder_heads(vision, row.width, "num_heads", multiple=4)
    if (out := vision.integer(row.out_width)) != text.hidden_size:
        vision.fail(row.out_width, f"must be the text model's hidden_size={text.hidden_size}, got {out}")
    layers, patch, merge = (vision.integer(name) for name in ("depth", "patch_size", "spatial_merge_size"))
    if (unit := patch * merge) ** 2 > MAX_IMAGE_PIXELS:
        vision.fail("patch_size", f"{patch} times spatial_merge_size={merge} is too large")
    inner = "intermediate_size"
    return GridParts(
        hidden_size=width,
        intermediate_size=vision.integer(inner) if inner in row.defaults else width * vision.integer("mlp_ratio"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        patch_size=patch,
        frames=vision.integer("temporal_patch_size"),
        merge_size=merge,
        max_rows=max_rows(_max_pixels(processor), unit),
        norm_eps=1e-6,
        is_centred=row.is_centred,
        hidden_act=vision.get("hidden_act"),
        is_gated=row.is_gated,
        patch_bias=row.patch_bias,
        rope_theta=_theta(vision),
        positions_per_side=_side(vision) if row.positions else 0,
        window=_window(vision, unit) if row.windows else 0,
        full_layers=_layers(vision, "fullatt_block_indexes", layers) if row.windows else (),
        deep_layers=_layers(vision, "deepstack_visual_indexes", layers) if row.deep else (),
        image_mean=processor.colours("image_mean", _MEAN),
        image_std=processor.colours("image_std", _STD),
        rescale_factor=processor.number("rescale_factor", 1e-6, 1.0, 1 / 255),
    )


def rope_axes(rope: dict[str, Any], row: GridArchitecture, text: ModelConfig, values: Values) -> tuple[int, ...]:
    """Return which of a token's positions turns each rotated pair of a head. rope: the text's rotation settings.

    Errors: ModelFileError.
    """
    count = (text.rotary_dim or text.head_dim) // 2
    assert row.sections is not None, row.names
    sections = rope.get("mrope_section") or row.sections
    is_three = isinstance(sections, list | tuple) and len(sections) == 3
    if not is_three or any(type(one) is not int or one < 1 for one in sections) or sum(sections) != count:
        values.fail("mrope_section", f"must be three positive numbers with the sum {count}, got {sections!r:.80}")
    if not row.in_turn:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(count))


def max_rows(max_pixels: int, unit: int) -> int:
    """Return the most rows of an image of max_pixels, or of the largest accepted. unit: side of a row's pixels."""
    return min(max_pixels, MAX_IMAGE_PIXELS) // unit**2 or 1


def _max_pixels(processor: Values) -> int:
    size = processor.get("size")
    longest = size.get("longest_edge") if isinstance(size, dict) else None
    most: Any = processor.get("max_pixels") or longest or 28 * 28 * 1280
    if type(most) is not int or most < 1:
        processor.fail("size", f"must have the most pixels of an image as longest_edge, got {most!r:.80}")
    return int(most)


def _theta(vision: Values) -> float:
    rope = vision.get("rope_parameters")
    theta = rope.get("rope_theta", 10_000.0) if isinstance(rope, dict) else 10_000.0
    if type(theta) not in (int, float) or not 1 <= theta <= 1e12:
        vision.fail("rope_parameters", f"must have a number as rope_theta, got {theta!r:.80}")
    return float(theta)


def _side(vision: Values) -> int:
    count = vision.integer("num_position_embeddings")
    if (side := math.isqrt(count)) ** 2 != count:
        vision.fail("num_position_embeddings", f"must be a square number, got {count}")
    return side


def _window(vision: Values, unit: int) -> int:
    size = vision.integer("window_size")
    if size < unit:
        vision.fail("window_size", f"must be at least patch_size * spatial_merge_size = {unit}, got {size}")
    return size // unit


def _layers(vision: Values, name: str, count: int) -> tuple[int, ...]:
    """Return indices of layers, ascending."""
    layers = vision.get(name)
    is_list = isinstance(layers, list) and all(type(layer) is int and 0 <= layer < count for layer in layers)
    if not is_list or layers != sorted(set(layers)):
        vision.fail(name, f"must be indices of the {count} layers, ascending; got {layers!r:.80}")
    return tuple(layers)
