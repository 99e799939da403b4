"""ModelConfig from a Hugging Face folder: config.json and generation_config.json, as in transformers 4 and 5.

Unimplemented settings that would change the arithmetic are refused by name.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from core.model_files.settings.architecture_settings import (
    activation,
    caps,
    layer_thetas,
    multipliers,
    residuals,
    rotary_dim,
    unrotated_layers,
    within_chunks,
)
from core.model_files.settings.encoder_config import encoder_of, most_tokens_of, read_encoder_config
from core.model_files.settings.expert_settings import experts
from core.model_files.settings.file_layers import our_layers
from core.model_files.settings.grid_settings import grid_architecture, grid_values, read_grid, rope_axes
from core.model_files.settings.internvl_settings import read_internvl
from core.model_files.settings.latent_settings import as_one_head, latent_features, latent_parts
from core.model_files.settings.layer_settings import (
    alike_mlps,
    layer_settings,
    of_text_alone,
    refuse_own_settings,
)
from core.model_files.settings.pixtral_settings import read_pixtral
from core.model_files.settings.pooled_settings import read_pooled
from core.model_files.settings.recurrent_settings import RECURRENT_NAMES, adjusted_sizes, recurrent_parts
from core.model_files.settings.rope_scaling import read_rope_scaling
from core.model_files.settings.siglip2_settings import read_siglip2
from core.model_files.settings.text_part import text_part
from core.model_files.settings.values import Values, model_sizes
from core.model_files.settings.vision_settings import read_vision, text_values, vision_architecture
from core.models.architectures.by_name import ARCHITECTURES, FORMS, Architecture, Form
from core.models.architectures.encoder_architectures import EncoderArchitecture, EncoderForm
from core.models.architectures.grid_architectures import GridArchitecture
from core.models.architectures.vision_architectures import VisionArchitecture
from core.models.config import ModelConfig, Packing
from core.models.layers.rope_scaling import ProportionalScaling, YarnScaling
from ipc.errors import ModelFileError
from ipc.files.model_files import read_small_file
from ipc.files.projector import PROCESSOR_FILE

_NAMES = ", ".join(ARCHITECTURES)

#: Settings of related architectures that are not implemented -> the value without effect.
_WITHOUT_EFFECT: dict[str, Any] = {
    "mlp_bias": False,
    "use_bias": False,
}


def read_json_config(folder: Path) -> ModelConfig:
    """Return the configuration of a model from its folder.

    Errors: ModelFileError naming the key for a missing or invalid value; UnsupportedModelError naming an unsupported
    feature.
    """
    values = Values(read_json_object(folder / "config.json"), str(folder / "config.json"))
    refuse_own_settings(values)
    if values.get("quantization_config") is None and (folder / _OWN_FILE).is_file():
        values.values |= _own_quantization(Values(read_json_object(folder / _OWN_FILE), str(folder / _OWN_FILE)))
    if (encoder := encoder_of(values)) is not None:
        return _encoder_config(folder, values, *encoder)
    if (vision := vision_architecture(values)) is not None:
        config = _vision_config(folder, values, vision)
    elif (grid := grid_architecture(values)) is not None:
        config = _grid_config(folder, values, grid)
    else:
        values = text_part(values) or values
        config = decoder_config(folder, values, *_architecture(values))
    if config.is_causal and not (folder / "modules.json").is_file():
        return config
    most = most_tokens_of(folder, read_json_object)
    if most is None or most >= config.max_position_embeddings:
        return config
    return msgspec.structs.replace(config, max_position_embeddings=most)


def decoder_config(folder: Path, values: Values, architecture: Architecture, form: Form) -> ModelConfig:
    """Return the configuration of a decoder from the settings in config.json. Errors: those of read_json_config()."""
    values.values = _with_defaults(values.values, architecture)
    if architecture.full_heads:
        of_text_alone(values)
    if architecture.has_streams:
        alike_mlps(values)
    adjusted_sizes(values, architecture)
    file_layers = our_layers(values, architecture)
    within_chunks(values, architecture)
    _refuse_features(values, architecture)
    routed = experts(values, architecture)
    if architecture.size_key != "intermediate_size":
        values.values["intermediate_size"] = values.integer(architecture.size_key)
    vocab_size, latent = values.integer("vocab_size"), latent_parts(values, architecture)
    values.values |= {} if latent is None else as_one_head(latent)
    sizes = model_sizes(values)
    features = _features(values, architecture, sizes) | ({} if latent is None else latent_features(values, latent))
    bos = values.token_ids("bos_token_id", vocab_size)
    eos = values.token_ids("eos_token_id", vocab_size)
    window = _window(values, architecture, sizes["num_hidden_layers"])
    sliding = window.get("sliding_layers", ())
    own = layer_settings(values, architecture, sizes, sliding)
    rotated = own["full_heads"].head_dim if own.get("full_heads") else sizes["head_dim"]
    rotated = rotated if latent is None else latent.rotated_dim
    rope = _rope(values, architecture, {**sizes, "head_dim": rotated})
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos += Values(read_json_object(generation), str(generation)).token_ids("eos_token_id", vocab_size)
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=vocab_size,
        tie_word_embeddings=values.boolean("tie_word_embeddings") or form != "causal",
        has_head=form == "causal",
        num_labels=_num_labels(values) if form == "classifier" else 0,
        embedding_size=0 if architecture.embedding_key is None else values.integer(architecture.embedding_key),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        dtype=_dtype(values),
        packing=read_packing(values, multiplies=bool(features.get("factors"))),
        **sizes,
        **(rope | layer_thetas(values, architecture, sliding, rope)),
        **window,
        **own,
        sees_all=_sees_all(values, architecture, form),
        **features,
        **caps(values, architecture),
        latent=latent,
        experts=routed,
        recurrent=recurrent_parts(values, architecture, sizes),
        file_layers=file_layers,
        unrotated_layers=unrotated_layers(values, architecture, sizes, sliding),
    )


def _vision_config(folder: Path, values: Values, row: VisionArchitecture) -> ModelConfig:
    """Return the configuration of a model with images: its text model's, with the vision encoder added."""
    text = text_values(values, row)
    config = decoder_config(folder, text, *_architecture(text))
    read = read_internvl if row.join == "norm and MLP" else read_vision
    return msgspec.structs.replace(config, vision=read(values, _processor(folder), row))


def _grid_config(folder: Path, values: Values, row: GridArchitecture) -> ModelConfig:
    """Return the configuration of a model with images of any size: that of its text model, with the encoder added."""
    vision, text = grid_values(values, row), text_part(values)
    assert text is not None, row.names
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sees_whole = text.get("use_bidirectional_attention") == "vision"
    config = decoder_config(folder, text, *_architecture(text))
    if vision is None:
        return config
    if row.form == "pooled":
        pooled = read_pooled(vision, _processor(folder), config, sees_whole=sees_whole)
        return msgspec.structs.replace(config, vision=pooled)
    if row.form == "pixtral":
        parts = read_pixtral(values, vision, _processor(folder), config, plain_merger=row.plain_merger)
        return msgspec.structs.replace(config, vision=parts)
    if row.form == "siglip2":
        return msgspec.structs.replace(config, vision=read_siglip2(values, vision, _processor(folder)))
    parts, axes = read_grid(vision, _processor(folder), row, config), rope_axes(rope, row, config, text)
    return msgspec.structs.replace(config, vision=parts, rope_axes=axes)


def _processor(folder: Path) -> Values:
    """Return the settings of a model's images, empty if there are none."""
    settings: dict[str, Any] = {}
    for name in ("processor_config.json", PROCESSOR_FILE):
        if (file := folder / name).is_file():
            own = read_json_object(file)
            inner = own.get("image_processor")
            settings |= inner if isinstance(inner, dict) else {} if name != PROCESSOR_FILE else own
    return Values(settings, str(folder / PROCESSOR_FILE))


def _encoder_config(folder: Path, values: Values, row: EncoderArchitecture, form: EncoderForm) -> ModelConfig:
    return read_encoder_config(
        values.values,
        values.source,
        row,
        form,
        dtype=_dtype(values),
        num_labels=_num_labels(values),
        most_tokens=most_tokens_of(folder, read_json_object),
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Errors: ModelFileError."""
    try:
        value = json.loads(read_small_file(path).decode())
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _architecture(values: Values) -> tuple[Architecture, Form]:
    """Return the architecture named by the config, and what follows the checkpoint's layers.

    A config saved from a bare LlamaConfig has a model_type but no architectures. transformers chooses its code by
    model_type; for some models that is Llama's code, and it saves them as a LlamaForCausalLM.
    """
    names, model_type = values.get("architectures"), values.get("model_type")
    if names is None and model_type is None:
        values.fail("architectures", f"is missing; supported are {_NAMES}")
    rows = ARCHITECTURES.values()
    found = [row for row in rows if model_type == row.model_type]
    if isinstance(names, list) and len(names) == 1 and str(names[0]) in FORMS:
        named, form = FORMS[str(names[0])]
        return found[0] if found else named, form
    if names is not None or not found:
        values.refuse("model_type" if names is None else "architectures", f"supported are {_NAMES}")
    return FORMS[found[0].name]


def _num_labels(values: Values) -> int:
    """Return a classifier's number of labels: from id2label, else num_labels, else transformers' default of 2."""
    labels, count = values.get("id2label"), values.get("num_labels")
    if isinstance(labels, dict) and labels:
        return len(labels)
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 0 < count < 2**16):
        values.fail("num_labels", f"must be an integer of at least 1, got {count!r:.80}")
    return count or 2


def _with_defaults(settings: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return the settings, with the architecture's defaults for missing ones.

    Rotary settings count as one setting, under either of their names.
    """
    rotary = {name: None for name in ("rope_parameters",) if settings.get("rope_scaling") is not None}
    given = {name: value for name, value in settings.items() if name != "rope_parameters" or value is not None}
    return {**architecture.defaults, **rotary, **given}


def _refuse_features(values: Values, architecture: Architecture) -> None:
    for name, only in architecture.only.items():
        if values.get(name) != only:
            values.refuse(name, f"only {json.dumps(only)} is")
    own = architecture.attention_bias_key, architecture.mlp_bias_key
    for name, plain in _WITHOUT_EFFECT.items():
        if name in own:
            continue
        if type(plain) is bool:
            values.boolean(name)
        if values.get(name) not in (None, plain):
            values.refuse(name, f"only {json.dumps(plain)} is")


def _is_bidirectional(values: Values) -> bool:
    return values.get("use_bidirectional_attention") is not None and values.boolean("use_bidirectional_attention")


def _sees_all(values: Values, architecture: Architecture, form: Form) -> bool:
    """Return whether tokens see the whole prompt. Only a pooling checkpoint may set it."""
    if architecture.sees_all == "always":
        if form != "base":
            values.refuse("architectures", f"of model_type {architecture.model_type} only {architecture.name!r} is")
        return True
    if not _is_bidirectional(values):
        return False
    if architecture.sees_all == "never" or form == "causal":
        values.refuse("use_bidirectional_attention", "only false is, but for Gemma 3 without a head")
    return True


def _dtype(values: Values) -> str:
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    if dtype not in ("float32", "float16", "bfloat16"):
        values.fail("dtype", f"must be float32, float16 or bfloat16, got {dtype!r:.80}")
    return str(dtype)


def _features(values: Values, architecture: Architecture, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the layer features by ModelConfig's names, except for rotation and window."""
    configured = values.boolean(architecture.attention_bias_key) and architecture.attention_bias == "as configured"
    scalar = architecture.scores_scalar
    if architecture.query_pre_attn_scalar:
        scalar = values.number("query_pre_attn_scalar", 1e-6, 1e6)
    return {
        "hidden_act": activation(values, architecture),
        "qkv_bias": configured or architecture.attention_bias == "qkv",
        "output_bias": configured and values.boolean("attention_out_bias", True),
        "mlp_bias": (key := architecture.mlp_bias_key) is not None and values.boolean(key),
        "head_bias": architecture.head_bias,
        "is_gated": architecture.is_gated,
        "residual": residuals(values, architecture),
        "centred_norms": architecture.centred_norms,
        "norm_bias": architecture.norm_bias,
        "qk_norm": architecture.qk_norm if (key := architecture.qk_norm_key) is None else values.boolean(key),
        "qk_norm_of_rows": architecture.qk_norm_of_rows,
        "qk_norm_by_head": architecture.qk_norm_by_head,
        "qk_norm_after": architecture.qk_norm_after,
        "qk_norm_plain": architecture.qk_norm_plain,
        "pre_norms": architecture.pre_norms,
        "post_norms": architecture.post_norms,
        "attention_sinks": architecture.attention_sinks,
        "output_gate": architecture.output_gate,
        "head_gates": architecture.head_gates,
        "norm_offset": architecture.norm_offset,
        "position_table": architecture.position_table,
        "scale_embeddings": architecture.scale_embeddings,
        "query_pre_attn_scalar": scalar,
        "fused_qkv": architecture.fused_qkv,
        "fused_gate_up": architecture.fused_gate_up,
        **multipliers(values, architecture, sizes),
    }


# --- rotary embedding ---------------------------------------------------------------------------------------------


def _rope(values: Values, architecture: Architecture, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings by ModelConfig's names.

    transformers 5 writes rope_parameters with theta and scaling; if layers differ, one such group per kind of layer.
    Earlier versions write theta, the sliding layers' theta and rope_scaling as separate keys.
    """
    own = architecture.sliding_rope_theta  # of sliding layers
    parameters = values.group("rope_parameters")
    if parameters is None or not architecture.own_sliding_rope:
        flat = _flat(values, parameters)
        rope = _rope_group(values, flat, architecture, architecture.rope_theta, sizes)
        if own is not None:
            own = values.number("rope_local_base_freq", 1.0, 1e12, own)
        return rope | {"sliding_rope_theta": own or (rope["rope_theta"] if architecture.own_sliding_rope else None)}
    full, sliding = parameters.group("full_attention"), parameters.group("sliding_attention")
    if full is None or sliding is None:
        values.fail("rope_parameters", "must have full_attention and sliding_attention")
    rope = _rope_group(values, full, architecture, architecture.rope_theta, sizes)
    other = _rope_group(values, sliding, architecture, own or architecture.rope_theta, sizes)
    if other["rope_scaling"] is not None:
        values.refuse("rope_parameters", "the rotary embedding of sliding layers cannot be scaled")
    return rope | {"sliding_rope_theta": other["rope_theta"]}


def _flat(values: Values, parameters: Values | None) -> Values:
    """Return the rotary settings of all layers as one group: rope_parameters, or else rope_scaling.

    theta may be outside the group; then it is copied into it.
    """
    scaling = values.group("rope_scaling")
    if parameters is not None and scaling is not None and parameters.values != scaling.values:
        values.fail("rope_scaling", "and rope_parameters contradict each other; one of them is expected")
    group = parameters or scaling or Values({}, values.source)
    if "rope_theta" not in group.values and values.get("rope_theta") is not None:
        theta = values.number("rope_theta", 1.0, 1e12)
        group.values = {**group.values, "rope_theta": theta}
    return group


def _rope_group(
    values: Values, group: Values, architecture: Architecture, theta: float, sizes: dict[str, Any]
) -> dict[str, Any]:
    """Return theta, the scaling and the number of rotated dimensions of a group. theta: the default.

    An original length outside the group takes precedence, as in transformers.
    """
    if (original := values.get("original_max_position_embeddings")) is not None:
        group.values = {**group.values, "original_max_position_embeddings": original}
    growth = group.get("llama_4_scaling_beta")
    if growth is not None:
        if not architecture.query_growth:
            group.refuse("llama_4_scaling_beta", "only null is")
        growth = group.number("llama_4_scaling_beta", 0.0, 1e6)
    if architecture.proportional_rope and group.get("rope_type") == "proportional":
        return _proportional(group, theta, sizes["head_dim"])
    width = rotary_dim(values, group, architecture, sizes["head_dim"])
    scaling = read_rope_scaling(group, sizes["max_position_embeddings"], width // 2 if architecture.longrope else None)
    return {
        "rope_theta": group.number("rope_theta", 1.0, 1e12, theta) * _ntk_factor(group, architecture, width),
        "rope_scaling": scaling,
        "query_growth": growth if isinstance(scaling, YarnScaling) else None,
        "rotary_dim": width if width != sizes["head_dim"] else None,
    }


def _proportional(group: Values, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the settings of a rotation of a head's first pairs, with the frequencies of the whole head."""
    proportion = group.number("partial_rotary_factor", 1e-3, 1.0, 1.0)
    scaling = ProportionalScaling(group.number("factor", 1e-6, 1e6, 1.0), int(proportion * head_dim // 2))
    return {"rope_theta": group.number("rope_theta", 1.0, 1e12, theta), "rope_scaling": scaling}


def _ntk_factor(group: Values, architecture: Architecture, width: int) -> float:
    """Return the factor of theta for a fixed alpha. width: number of rotated numbers per head.

    With other scalings than "dynamic", transformers does not read it.
    """
    if group.get("alpha") is None:
        return 1.0
    if not architecture.ntk_alpha:
        group.refuse("alpha", "only null is")
    if group.values.get("rope_type", group.values.get("type")) != "dynamic":
        return 1.0
    return float(group.number("alpha", 1e-3, 1e9) ** (width / max(1, width - 2)))


# --- sliding window -----------------------------------------------------------------------------------------------


def _window(values: Values, architecture: Architecture, num_layers: int) -> dict[str, Any]:
    """Return the window settings by ModelConfig's names; empty for a model without sliding layers."""
    match architecture.sliding:
        case "none":
            layers: tuple[int, ...] = ()
            kinds = values.get("layer_types") or values.get("layers_block_type") or []
            alike = isinstance(kinds, list) and {"attention", "full_attention"}.issuperset(map(str, kinds))
            if architecture.recurrent is None and not alike:
                values.refuse("layer_types", f"all layers of a {architecture.name} have full attention")
        case "all":
            if values.get("layer_types") is not None and values.get("sliding_window") is not None:
                values.refuse("layer_types", f"all layers of a {architecture.name} are alike")
            layers = tuple(range(num_layers)) if values.get("sliding_window") is not None else ()
        case "from max_window_layers":
            layers = ()
            if values.boolean("use_sliding_window"):
                first = values.integer("max_window_layers") if values.get("sliding_window") is not None else num_layers
                layers = _named_layers(values, architecture, tuple(range(first, num_layers)))
        case "by sliding_window_pattern":
            layers = ()
            if values.get("sliding_window") is not None or values.get("layer_types") is None:
                pattern = values.integer("sliding_window_pattern")
                layers = _named_layers(values, architecture, pattern_layers(pattern, num_layers))
        case "by_first_of_pattern":
            pattern = values.integer("sliding_window_pattern")
            layers = _named_layers(values, architecture, tuple(n for n in range(num_layers) if n % pattern))
        case "by layer_types":
            layers = _named_layers(values, architecture, ()) if values.boolean("use_sliding_window") else ()
        case "by layer_types, else all":
            all_layers = tuple(range(num_layers)) if values.get("sliding_window") is not None else ()
            layers = _named_layers(values, architecture, all_layers)
        case "by chunks":
            layers = ()
    if architecture.full_heads:  # transformers makes the last layer so
        layers = tuple(layer for layer in layers if layer != num_layers - 1)
    if not layers:
        return {}
    window = values.integer("sliding_window")
    if architecture.sees_all == "always":  # the token itself, and the window on each side
        window += 1
    elif _is_bidirectional(values):  # half of the window on each side
        window = window // 2 + 1
    return {"sliding_window": window, "sliding_layers": layers}


def _named_layers(values: Values, architecture: Architecture, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sliding layers that layer_types names; the default if there is no such list."""
    names, num_layers = values.get("layer_types"), values.integer("num_hidden_layers")
    if names is None:
        return default
    if not isinstance(names, list) or len(names) != num_layers:
        values.fail("layer_types", f"must be a list of {num_layers} names, one for each layer; got {names!r:.80}")
    known = ("full_attention", "sliding_attention", *(RECURRENT_NAMES if architecture.recurrent else ()))
    if any(name not in known for name in names):
        values.refuse("layer_types", f"{' and '.join(map(repr, known))} are")
    return tuple(layer for layer, name in enumerate(names) if name == "sliding_attention")


def pattern_layers(pattern: int, num_layers: int) -> tuple[int, ...]:
    """Return the sliding layers of a model in which every `pattern`-th layer has full attention."""
    return tuple(layer for layer in range(num_layers) if (layer + 1) % pattern)


# The quantization of a safetensors folder, from its config.json: which tensors a matrix is stored as.


_METHODS = ("gptq", "awq", "auto-round", "compressed-tensors", "fp8", "modelopt", "mxfp4", "bitsandbytes", "torchao")
#: The quant_method of a model that transformers has read from a GGUF file: its tensors are plain.
PLAIN_METHOD = "gguf"
#: Where Model Optimizer's older exports say what newer ones say in config.json.
_OWN_FILE = "hf_quant_config.json"
#: Formats of compressed-tensors in which a weight is a code and a scale.
_FORMATS = (
    *("dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)


def read_packing(values: Values, *, multiplies: bool = False) -> Packing:
    """Return how a model's matrices are packed; "none" without a quantization_config.

    multiplies: they are multiplied by factors when they are read.

    Only settings that change the weights' numbers count, because options decide what else is quantized. Errors:
    ModelFileError for a value of the wrong type; UnsupportedModelError naming an unsupported setting.
    """
    config = values.group("quantization_config")
    if config is None or config.get("quant_method") == PLAIN_METHOD:
        return "none"
    if multiplies:
        values.refuse("quantization_config", "of an architecture without factors of products it is")
    method = _one_of(config, "quant_method", *_METHODS)
    if method == "gptq":
        return _gptq(config)
    if method == "auto-round":
        return _auto_round(config)
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method == "awq":
        _one_of(config, "version", None, "gemm", "GEMM")
        return "awq"
    if method == "bitsandbytes":
        _one_of(config, "bnb_4bit_quant_type", None, "nf4", "fp4")
    elif method == "fp8":
        _one_of(config, "fmt", None, "e4m3")
    elif method == "modelopt":
        _one_of(config, "quant_algo", "FP8")
        return "fp8"
    packing: Packing = method
    return packing


def _own_quantization(values: Values) -> dict[str, Any]:
    """Return the settings in Model Optimizer's own file as config.json's; empty if only the KV cache is quantized."""
    found = values.group("quantization")
    if found is None or found.get("quant_algo") is None:
        return {}
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": found.get("quant_algo")}}


def _gptq(config: Values) -> Packing:
    """GPTQ stores each zero minus one, unless checkpoint_format is gptq_v2 (GPTQModel)."""
    _one_of(config, "is_marlin_format", None, False)
    return "gptq_v2" if _one_of(config, "checkpoint_format", None, "gptq", "gptq_v2") == "gptq_v2" else "gptq"


def _auto_round(config: Values) -> Packing:
    """AutoRound packs like GPTQ or AWQ. Without either name it is GPTQ with unchanged zeros."""
    _one_of(config, "data_type", None, "int")
    rows: dict[Any, Packing] = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
    return rows.get(_one_of(config, "packing_format", None, "auto_round", "auto_round:gptqmodel", *rows), "gptq_v2")


def _compressed_tensors(config: Values) -> Packing:
    formats: list[Any] = [config.get("format")]
    groups = config.group("config_groups")
    formats += [group.get("format") for group in groups.values.values() if isinstance(group, dict)] if groups else []
    for found in formats:
        _one_of(Values({"format": found}, config.source, prefix="quantization_config."), "format", None, *_FORMATS)
    if (sparsity := config.group("sparsity_config")) is not None:
        _one_of(sparsity, "format", None, "dense")
    if config.get("transform_config"):
        config.refuse("transform_config", "only an empty one is")
    return "compressed-tensors"


def _one_of(values: Values, name: str, *supported: Any) -> Any:
    """Return the value of a name if it is supported. Errors: UnsupportedModelError."""
    value = values.get(name)
    if value not in supported:
        values.refuse(name, "supported: " + ", ".join(json.dumps(one) for one in supported if one is not None))
    return value
