"""The shapes of a model's weights, by our names and in the order of use."""

from core.model_files.tensors.encoder_weights import encoder_shapes
from core.model_files.tensors.latent_tensors import latent_shapes
from core.model_files.tensors.recurrent_tensors import recurrence_shapes
from core.models.config import XIELU_NAMES, ExpertParts, ModelConfig
from core.models.layers.streams import stream_shapes
from kernels.value_form import SIDES


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by name, in the order of use; matrices are [out, in]."""
    if config.encoder is not None:
        return encoder_shapes(config)
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    if config.position_table:
        shapes["model.embed_positions.weight"] = (config.max_position_embeddings, hidden)
    if (own := config.per_layer) is not None:
        width = config.num_hidden_layers * own.width
        if own.vocab_size:
            shapes["model.embed_tokens_per_layer.weight"] = (own.vocab_size, width)
        shapes["model.per_layer_model_projection.weight"] = (width, hidden)
        shapes["model.per_layer_projection_norm.weight"] = (own.width,)
    if (streams := config.streams) is not None:
        for name in ("stream_projections", "stream_outputs"):
            shapes |= {f"model.{name}.{number}.weight": (hidden, hidden) for number in range(streams.count - 1)}
    for layer in range(config.num_hidden_layers):
        for name, shape in layer_shapes(config, layer).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes |= _norm_shapes(config, "model.norm")
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
        shapes |= {"lm_head.bias": (config.vocab_size,)} if config.head_bias else {}
    if config.embedding_size:
        shapes["model.embedding_projection.weight"] = (config.embedding_size, hidden)
    if config.num_labels:
        shapes["score.weight"] = (config.num_labels, hidden)
    return shapes


def layer_shapes(config: ModelConfig, layer: int = 0) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a layer by name, without the layer's prefix."""
    hidden = config.hidden_size
    has_pre_norms, has_post_norms = config.norms_of(layer)
    shapes = _norm_shapes(config, "input_layernorm") if has_pre_norms else {}
    shapes |= mixer_shapes(config, layer)
    norms = [] if config.residual == "parallel with one norm" else ["post_attention_layernorm"]
    if not config.has_mlp(layer):
        return shapes
    if has_post_norms:
        norms += ["pre_feedforward_layernorm"] if has_pre_norms else []
        norms += ["post_feedforward_layernorm"]
    shapes |= _norm_shapes(config, *norms)
    if config.has_dense_mlp(layer):
        dense = _mlp_shapes(config, "mlp.", config.mlp_size(layer))
        biases = {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in dense.items()}
        shapes |= dense | (biases if config.mlp_bias else {})
    if config.experts is not None and config.has_experts(layer):
        shapes |= _experts_shapes(config, config.experts)
    if (own := config.per_layer) is not None:
        shapes["per_layer_input_gate.weight"] = (own.width, hidden)
        shapes["per_layer_projection.weight"] = (hidden, own.width)
        shapes |= _norm_shapes(config, "post_per_layer_input_norm")
    shapes |= {"layer_scale.weight": (1,)} if config.layer_scales else {}
    return shapes | ({} if config.streams is None else stream_shapes(config.streams, hidden))


def _experts_shapes(config: ModelConfig, experts: ExpertParts) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"mlp.router.weight": (experts.num_experts, hidden)}
    if experts.has_shared_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    if experts.has_correction:
        shapes["mlp.router_correction.bias"] = (experts.num_experts,)
    for number in range(experts.num_experts):
        shapes |= _mlp_shapes(config, f"mlp.experts.{number}.", experts.intermediate_size)
    if experts.has_biases:
        routed = {name: shape for name, shape in shapes.items() if name.startswith("mlp.")}
        shapes |= {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in routed.items()}
    if experts.shared_size:
        shapes |= _mlp_shapes(config, "mlp.shared_expert.", experts.shared_size)
    if experts.has_scales:
        shapes["mlp.expert_scales.weight"] = (experts.num_experts,)
    if experts.beside_dense:
        shapes["mlp.router_norm.weight"] = (hidden,)
        shapes |= _norm_shapes(config, "experts_layernorm", "post_mlp_layernorm", "post_experts_layernorm")
    return shapes


def _norm_shapes(config: ModelConfig, *names: str) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if config.norm_bias else ("weight",)
    return {f"{name}.{kind}": (config.hidden_size,) for name in names for kind in kinds}


def _mlp_shapes(config: ModelConfig, prefix: str, size: int) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]]
    if config.fused_gate_up:
        shapes = {f"{prefix}gate_up_proj.weight": (2 * size, hidden)}
    else:
        names = ("gate", "up") if config.is_gated else ("up",)
        shapes = {f"{prefix}{name}_proj.weight": (size, hidden) for name in names}
    if config.hidden_act == "xielu" and not config.xielu:
        shapes |= {f"{prefix}{name}.weight": (1,) for name in XIELU_NAMES}
    return shapes | {f"{prefix}down_proj.weight": (hidden, size)}


# mixer_shapes: the shapes of the weights of a layer's first half (core/models/layers/mixers.py).


def mixer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of attention, or of what replaces it in the layer, by name."""
    if layer in config.recurrent_layers:
        return recurrence_shapes(config)
    return _attention_shapes(config, layer) if config.latent is None else latent_shapes(config, config.latent)


def _attention_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, (kv_heads, head_dim), values = config.hidden_size, config.heads_of(layer), config.value_form(layer)
    query_size, kv_size = config.num_attention_heads * head_dim, kv_heads * head_dim
    products = {"q": query_size * (2 if config.output_gate else 1)}
    products |= dict.fromkeys("kv"[: SIDES[values]], kv_size)
    if config.fused_qkv:
        products = {"qkv": query_size + 2 * kv_size}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in products.items():
        shapes[f"self_attn.{name}_proj.weight"] = (size, hidden)
    if config.qkv_bias:
        for name, size in products.items():
            shapes[f"self_attn.{name}_proj.bias"] = (size,)
    if config.qk_norm and config.qk_norm_by_head:
        heads = {"q": config.num_attention_heads, "k": kv_heads}
        names = [f"heads.{head}.{name}_norm" for name, count in heads.items() for head in range(count)]
        shapes |= {f"self_attn.{name}.weight": (head_dim,) for name in names}
    elif config.qk_norm and not config.qk_norm_plain:
        widths = (query_size, kv_size) if config.qk_norm_of_rows else (head_dim, head_dim)
        normed = zip("q" if values == "shared" else "qk", widths, strict=False)
        shapes |= {f"self_attn.{name}_norm.weight": (width,) for name, width in normed}
    if config.head_gates:
        shapes["self_attn.g_proj.weight"] = (config.num_attention_heads, hidden)
    shapes["self_attn.o_proj.weight"] = (hidden, query_size)
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.attention_sinks:
        shapes["self_attn.sinks.weight"] = (config.num_attention_heads,)
    return shapes
