"""The settings of encoders whose rows are means of patches (Gemma 4), in a model's config.json."""

from typing import Any

from core.model_files.settings.values import Values
from core.models.config import ModelConfig
from core.models.grid_parts import GridParts, PooledParts
from ipc.wire.feature_messages import MAX_IMAGE_PIXELS

#: Rows of an image in transformers' processor, which takes no other numbers.
NUM_ROWS = (70, 140, 280, 560, 1120)
_HALF = (0.5, 0.5, 0.5)


def read_pooled(vision: Values, processor: Values, text: ModelConfig, *, sees_whole: bool) -> GridParts:
    """Return the encoder with these settings. processor: of PROCESSOR_FILE, empty if there is none.

    Errors: ModelFileError, UnsupportedModelError.
    """
    if vision.get("hidden_activation") != "gelu_pytorch_tanh":
        vision.refuse("hidden_activation", "'gelu_pytorch_tanh' is")
    if vision.get("attention_bias") not in (None, False):
        vision.refuse("attention_bias", "only false is")
    if (most := processor.integer("max_soft_tokens", 280)) not in NUM_ROWS:
        processor.fail("max_soft_tokens", f"must be one of {', '.join(map(str, NUM_ROWS))}, got {most}")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
    sizes: dict[str, Any] = {name: vision.integer(name) for name in names}
    parts = GridParts(
        **sizes,
        frames=1,
        merge_size=vision.integer("pooling_kernel_size"),
        max_rows=most,
        norm_eps=vision.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        is_centred=False,
        hidden_act="gelu_pytorch_tanh",
        is_gated=True,
        patch_bias=False,
        colours_last=True,
        rope_theta=_theta(vision),
        pooled=PooledParts(
            num_key_value_heads=vision.integer("num_key_value_heads"),
            head_dim=vision.integer("head_dim"),
            positions_per_axis=vision.integer("position_embedding_size"),
            clips=vision.boolean("use_clipped_linears"),
            standardizes=vision.boolean("standardize"),
        ),
        sees_whole=sees_whole,
        turns_by_place=False,
        image_mean=_HALF,  # the encoder itself takes pixels from -1 to 1
        image_std=_HALF,
        rescale_factor=processor.number("rescale_factor", 1e-6, 1.0, 1 / 255),
    )
    check_pooled(parts, vision, text)
    return parts


def check_pooled(parts: GridParts, values: Values, text: ModelConfig) -> None:
    """Check that an encoder's sizes fit each other and the text model's.

    Errors: ModelFileError, UnsupportedModelError.
    """
    pooled, side = parts.pooled, parts.max_rows * parts.merge_size
    assert pooled is not None, parts
    if pooled.head_dim % 4:
        values.fail("head_dim", f"must be a multiple of 4, got {pooled.head_dim}")
    if parts.num_attention_heads % pooled.num_key_value_heads:
        values.fail("num_attention_heads", f"must be a multiple of the KV heads, {pooled.num_key_value_heads}")
    if parts.max_rows * parts.unit**2 > MAX_IMAGE_PIXELS:
        values.fail("patch_size", f"{parts.patch_size} with {parts.merge_size} patches a row is too large")
    if side > pooled.positions_per_axis:
        values.fail("position_embedding_size", f"must be at least {side}, the most patches in a row of an image")
    if parts.sees_whole and text.sliding_window is not None and parts.max_rows > text.sliding_window:
        values.refuse("max_soft_tokens", f"at most the text's sliding_window={text.sliding_window} is")


def _theta(vision: Values) -> float:
    rope = vision.get("rope_parameters")
    kind = rope.get("rope_type", "axial") if isinstance(rope, dict) else "axial"
    if kind not in ("axial", "default"):
        vision.refuse("rope_parameters", "rope_type 'axial' is")
    theta = rope.get("rope_theta", 100.0) if isinstance(rope, dict) else 100.0
    if type(theta) not in (int, float) or not 1 <= theta <= 1e12:
        vision.fail("rope_parameters", f"must have a number as rope_theta, got {theta!r:.80}")
    return float(theta)
