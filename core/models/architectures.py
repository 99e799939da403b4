"""The in-tree architectures, as data: the properties of a model that neither config.json nor a GGUF file states.

An architecture is one row of this table. The code that reads files uses the row and never compares names.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from core.models.config import Activation


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture. Settings have their names in config.json."""

    name: str  # in config.json's architectures
    model_type: str  # config.json's model_type
    base_name: str  # in architectures, of a checkpoint without a head
    gguf: str | None  # general.architecture; None: llama.cpp uses another architecture's name for it
    #: Default values in transformers' config class of settings that config.json may lack.
    defaults: Mapping[str, Any] = msgspec.field(default_factory=dict)
    activation_key: str = "hidden_act"
    activation: Activation = "silu"  # if a file does not name one
    #: The biases of attention. "qkv": on Q, K and V. "as configured": on Q, K, V and the output, if the setting
    #: attention_bias is true.
    attention_bias: Literal["none", "qkv", "as configured"] = "none"
    #: The layers with a sliding window, if there is a window: those that layer_types names. Without layer_types: the
    #: layers from max_window_layers on, or all but the last of every sliding_window_pattern layers.
    sliding: Literal["none", "all", "from max_window_layers", "by sliding_window_pattern"] = "none"
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0  # added to norms as Hugging Face stores them; llama.cpp stores the sum
    scale_embeddings: bool = False
    query_pre_attn_scalar: bool = False  # the setting exists
    rope_theta: float = 10_000.0  # if a file does not state it
    sliding_rope_theta: float | None = None  # of sliding layers, if a file does not state it; None: they use rope_theta
    gguf_interleaves_heads: bool = False  # llama.cpp's converter reorders the rows of q and k


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

_ROWS = (
    Architecture(
        name="LlamaForCausalLM",
        base_name="LlamaModel",
        model_type="llama",
        gguf="llama",
        attention_bias="as configured",
        gguf_interleaves_heads=True,
    ),
    Architecture(
        name="MistralForCausalLM",
        base_name="MistralModel",
        model_type="mistral",
        gguf=None,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        sliding="all",
    ),
    Architecture(
        name="Qwen2ForCausalLM",
        base_name="Qwen2Model",
        model_type="qwen2",
        gguf="qwen2",
        defaults={"num_key_value_heads": 32, **_QWEN_WINDOW},
        attention_bias="qkv",
        sliding="from max_window_layers",
    ),
    Architecture(
        name="Qwen3ForCausalLM",
        base_name="Qwen3Model",
        model_type="qwen3",
        gguf="qwen3",
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOW},
        attention_bias="as configured",
        sliding="from max_window_layers",
        qk_norm=True,
    ),
    Architecture(
        name="Gemma3ForCausalLM",
        base_name="Gemma3TextModel",
        model_type="gemma3_text",
        gguf="gemma3",
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        attention_bias="as configured",
        sliding="by sliding_window_pattern",
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        scale_embeddings=True,
        query_pre_attn_scalar=True,
        rope_theta=1_000_000.0,
        sliding_rope_theta=10_000.0,
    ),
)

ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in _ROWS}
GGUF_ARCHITECTURES: dict[str, Architecture] = {row.gguf: row for row in _ROWS if row.gguf is not None}

#: What a checkpoint has on top of its layers: a language model's head, nothing, or a classifier of prompts.
Form = Literal["causal", "base", "classifier"]


def _forms(row: Architecture) -> dict[str, tuple[Architecture, Form]]:
    """Return the names in config.json's architectures of checkpoints with this row's layers."""
    stem = row.base_name.removesuffix("Model")
    return {
        row.name: (row, "causal"),
        row.base_name: (row, "base"),
        f"{stem}ForSequenceClassification": (row, "classifier"),
    }


#: By each name in config.json's architectures that runs here.
FORMS: dict[str, tuple[Architecture, Form]] = {name: form for row in _ROWS for name, form in _forms(row).items()}
