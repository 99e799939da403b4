"""gguf_experts: the properties of routed MLPs in a GGUF file, as ExpertParts."""

import msgspec

from core.model_files.settings.expert_settings import expert_groups, expert_parts
from core.model_files.settings.values import Values
from core.models.architectures.architecture import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN, Architecture
from core.models.config import ExpertParts
from ipc.files.gguf import GgufHeader

_FUNCTIONS = {SOFTMAX: "softmax", SIGMOID: "sigmoid", SOFTMAX_OF_CHOSEN: "softmax of the chosen"}


def gguf_experts(
    values: Values, header: GgufHeader, architecture: Architecture, dense: tuple[int, ...]
) -> ExpertParts | None:
    """Return the routed MLPs' properties, or None for an architecture without them.

    dense: the layers without a router. In older files only the architecture determines whether weights sum to 1.
    Errors: ModelFileError, UnsupportedModelError.
    """
    row = architecture.experts
    if row is None:
        return None
    is_sigmoid = _gating(values, row.gguf_gating) == SIGMOID
    if values.get("num_experts") in (None, 0) and (architecture.recurrent is not None or row.enabled_key):
        return None
    size = "moe_intermediate_size" if values.get("moe_intermediate_size") is not None else "intermediate_size"
    normalises = values.boolean("norm_topk_prob", row.gguf_normalises)
    parts = expert_parts(values, "num_experts", size, normalises=normalises)
    shared = 0
    if values.get("shared_expert_intermediate_size") not in (None, 0):
        shared = values.integer("shared_expert_intermediate_size")
    elif values.get("n_shared_experts") not in (None, 0):
        shared = parts.intermediate_size * values.integer("n_shared_experts")
    elif any(name.endswith(".ffn_up_shexp.weight") for name in header.tensors) and row.scales_inputs:
        shared = parts.intermediate_size  # Llama 4's files do not state it
    if shared and row.shared_size_key is None and row.shared_count_key is None:
        values.refuse("n_shared_experts", f"a {architecture.name} has none; only 0 is")
    # some converters write 0 instead of omitting it
    scaling = values.number("routed_scaling_factor", 0.0, 1e6, 1.0) or 1.0
    if scaling != 1.0 and not row.scales:
        values.refuse("routed_scaling_factor", "only 1.0 is")
    return msgspec.structs.replace(
        parts,
        dense_layers=() if row.beside_dense else dense,
        has_biases=row.has_biases,
        shared_size=shared,
        has_shared_gate=row.has_shared_gate and shared > 0,
        is_sigmoid=is_sigmoid,
        scales_inputs=row.scales_inputs,
        added_to_sum=row.added_to_sum,
        has_scales=row.beside_dense and any(name.endswith(".ffn_down_exps.scale") for name in header.tensors),
        beside_dense=row.beside_dense,
        has_correction=any(name.endswith(".exp_probs_b.bias") for name in header.tensors),
        scaling=scaling,
        **(expert_groups(values, 2 if is_sigmoid else 1, parts) if row.groups != "none" else {}),
    )


def _gating(values: Values, numbers: tuple[int, ...]) -> int:
    number = values.get("expert_gating")
    if number in (None, 0):
        return numbers[0]
    if number not in numbers:
        named = " and ".join(f"{number} ({_FUNCTIONS[number]})" for number in numbers)
        values.refuse("expert_gating", f"{named} {'is' if len(numbers) == 1 else 'are'}")
    return int(number)
