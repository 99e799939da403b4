"""mixer_shapes: the shapes of the weights of a layer's first half (core/models/layers/mixers.py)."""

from core.model_files.tensors.latent_tensors import latent_shapes
from core.model_files.tensors.recurrent_tensors import recurrence_shapes
from core.models.config import ModelConfig


def mixer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of attention, or of what the layer has in place of it, by name."""
    if layer in config.recurrent_layers:
        return recurrence_shapes(config)
    return _attention_shapes(config) if config.latent is None else latent_shapes(config, config.latent)


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    query_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    products = {"q": query_size * (2 if config.output_gate else 1), "k": kv_size, "v": kv_size}
    if config.fused_qkv:
        products = {"qkv": query_size + 2 * kv_size}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in products.items():
        shapes[f"self_attn.{name}_proj.weight"] = (size, hidden)
    if config.qkv_bias:
        for name, size in products.items():
            shapes[f"self_attn.{name}_proj.bias"] = (size,)
    if config.qk_norm and config.qk_norm_by_head:
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        names = [f"heads.{head}.{name}_norm" for name, count in heads.items() for head in range(count)]
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in names}
    elif config.qk_norm:
        widths = (query_size, kv_size) if config.qk_norm_of_rows else (config.head_dim, config.head_dim)
        shapes |= {f"self_attn.{name}_norm.weight": (width,) for name, width in zip("qk", widths, strict=True)}
    shapes["self_attn.o_proj.weight"] = (hidden, query_size)
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.attention_sinks:
        shapes["self_attn.sinks.weight"] = (config.num_attention_heads,)
    return shapes
