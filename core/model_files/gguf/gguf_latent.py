"""gguf_latent: the properties of latent attention in a GGUF file, as LatentParts."""

import math
from typing import Any

from core.model_files.settings.latent_settings import checked_latent, scalar_of
from core.model_files.settings.values import Values
from core.models.architectures.by_name import Architecture
from core.models.config import LatentParts
from ipc.files.gguf import GgufHeader


def gguf_latent(values: Values, header: GgufHeader, architecture: Architecture) -> LatentParts | None:
    """Return the properties of latent attention; None for an architecture without it.

    Newer files state the cached vector as key and value, and the heads' sizes beside it. Errors: ModelFileError,
    UnsupportedModelError.
    """
    if not architecture.latent:
        return None
    rotated = values.integer("rotary_dim")
    width = values.integer("key_length_mla", values.integer("head_dim"))
    if width <= rotated:
        values.fail("rotary_dim", f"must be less than the width of a head, {width}; got {rotated}")
    return checked_latent(
        values,
        LatentParts(
            query_dim=None if values.get("q_lora_rank") in (None, 0) else values.integer("q_lora_rank"),
            latent_dim=values.integer("kv_lora_rank"),
            plain_dim=width - rotated,
            rotated_dim=rotated,
            value_dim=values.integer("v_head_dim", values.integer("value_length")),
            is_split="blk.0.attn_k_b.weight" in header.tensors,
        ),
    )


def scale_of(values: Values, latent: LatentParts | None) -> dict[str, Any]:
    """Return the scale of scores, as ModelConfig has it; empty without latent attention.

    The file has a tenth of DeepSeek's mscale_all_dim.
    """
    if latent is None:
        return {}
    multiplier, kind = 1.0, values.get("rope_type")
    if kind == "yarn" and values.get("factor") not in (None, 0, 1):
        tenth = values.number("yarn_log_multiplier", 0.0, 1e6, 0.0)
        multiplier += tenth * math.log(values.number("factor", 1e-6, 1e6))
    return {"query_pre_attn_scalar": scalar_of(latent, multiplier)}
