"""Tiny random checkpoints of models with images, of which the text's model runs here; made by transformers."""

from typing import Any

import torch

from tests.core.models.checkpoints import CASES, SIZES
from tests.core.models.gemma4_checkpoints import GEMMA4_CASES

_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [0]}
_SMALL = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 48}
_SMALL |= {"deepstack_visual_indexes": [0]}
_QWEN2 = {"depth": 1, "hidden_size": 48, "embed_dim": 32, "num_heads": 2, "fullatt_block_indexes": [0]}
_QWEN2 |= {"out_hidden_size": 48, "intermediate_size": 32}
_LAYERS = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
#: Name -> stem of transformers' classes, settings of text_config beside SIZES, and of vision_config.
TEXT_PART_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl": ("Qwen3VL", {"head_dim": 16, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}, _SMALL),
    "qwen3-vl-moe": ("Qwen3VLMoe", {"head_dim": 16, "rope_parameters": _MROPE, **_EXPERTS}, _SMALL),
    "qwen2.5-vl": ("Qwen2_5_VL", {"hidden_size": 64, "rope_parameters": _MROPE}, {**_QWEN2, "out_hidden_size": 64}),
    "qwen2-vl": ("Qwen2VL", {"hidden_size": 64, "rope_parameters": _MROPE}, {**_QWEN2, "hidden_size": 64}),
    "mistral3": ("Mistral3", {"model_type": "mistral", "head_dim": 16}, {"model_type": "pixtral", **_LAYERS}),
    "ministral3": (
        "Mistral3",
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3}},
        {"model_type": "pixtral", **_LAYERS},
    ),
    "internvl-qwen2": ("InternVL", {"model_type": "qwen2"}, {"model_type": "internvl_vision", **_LAYERS}),
    "internvl-qwen3": (
        "InternVL",
        {"model_type": "qwen3", "head_dim": 16},
        {"model_type": "internvl_vision", **_LAYERS},
    ),
    "gemma4": (
        "Gemma4",
        {**GEMMA4_CASES["gemma4-e2b"][1], "pad_token_id": 0},
        {**_LAYERS, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "llama4": (
        "Llama4",
        {**CASES["llama4"][1], "pad_token_id": 0},
        {**_LAYERS, "image_size": 28, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "gemma4-unified": (
        "Gemma4Unified",
        {**GEMMA4_CASES["gemma4-12b"][1], "pad_token_id": 0},
        {"mm_embed_dim": 48, "mm_posemb_size": 16, "output_proj_dims": 48},
    ),
}


def build_whole(case: str, *, tied: bool = False) -> Any:
    """A model of transformers', with random weights in its text's model."""
    import transformers

    stem, text, vision = TEXT_PART_CASES[case]
    config = getattr(transformers, f"{stem}Config")(
        text_config={**SIZES, **text, "tie_word_embeddings": tied}, vision_config=vision, tie_word_embeddings=tied
    )
    config._attn_implementation = "eager"
    config.text_config._attn_implementation = "eager"
    config.text_config._experts_implementation = "eager"  # the others have no float64
    model = getattr(transformers, f"{stem}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            numbers = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(parameter + 0.3 * numbers if "norm" in name else 0.5 * numbers)
            else:
                parameter.copy_(numbers * 1.5 * parameter.shape[-1] ** -0.5)
    return model
