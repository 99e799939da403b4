"""The settings of latent attention in config.json, as LatentParts, and values derived from them.

Errors of all functions: ModelFileError naming the key; UnsupportedModelError.
"""

from typing import Any

from core.model_files.settings.rope_scaling import yarn_attention_factor
from core.model_files.settings.values import Values
from core.models.architectures.by_name import Architecture
from core.models.config import LatentParts

_STEP = 32  # the kernels take latent vectors in whole steps


def latent_parts(values: Values, architecture: Architecture) -> LatentParts | None:
    """Return the properties of latent attention, or None for an architecture without it."""
    if not architecture.latent:
        return None
    value_dim = None
    if values.get("v_head_dim") is None:  # as MiniCPM3's config has it
        value_dim = values.integer("hidden_size") // values.integer("num_attention_heads")
    return checked_latent(
        values,
        LatentParts(
            query_dim=None if values.get("q_lora_rank") is None else values.integer("q_lora_rank"),
            latent_dim=values.integer("kv_lora_rank"),
            plain_dim=values.integer("qk_nope_head_dim"),
            rotated_dim=values.integer("qk_rope_head_dim"),
            value_dim=values.integer("v_head_dim", value_dim),
        ),
    )


def checked_latent(values: Values, latent: LatentParts) -> LatentParts:
    """Return the parts. Errors: UnsupportedModelError, ModelFileError for sizes that the kernels do not support."""
    if latent.latent_dim % _STEP:
        values.refuse("kv_lora_rank", f"multiples of {_STEP} are")
    for name, size in (("qk_rope_head_dim", latent.rotated_dim), ("qk_nope_head_dim", latent.plain_dim)):
        if size % 2:
            values.fail(name, f"must be even, got {size}")
    return latent


def as_one_head(latent: LatentParts) -> dict[str, int]:
    """Return the sizes of attention as it is computed, by their names in config.json."""
    return {"head_dim": latent.latent_dim + latent.rotated_dim, "num_key_value_heads": 1}


def latent_features(values: Values, latent: LatentParts) -> dict[str, Any]:
    """Return the scale of scores in ModelConfig's form: DeepSeek's YaRN multiplies scores by a square."""
    group = values.group("rope_parameters") or values.group("rope_scaling") or Values({}, values.source)
    kind = group.get("rope_type") or group.get("type") or "default"
    mscale = group.number("mscale_all_dim", 0.0, 1e6, 0.0)
    multiplier = 1.0
    if kind != "default" and mscale:
        multiplier = yarn_attention_factor(group.number("factor", 1e-6, 1e6), mscale)
    return {"query_pre_attn_scalar": scalar_of(latent, multiplier)}


def scalar_of(latent: LatentParts, multiplier: float) -> float:
    """Return query_pre_attn_scalar for scores that are scaled by the square of a multiplier."""
    return (latent.plain_dim + latent.rotated_dim) / multiplier**4
