"""ModelConfig of an encoder from its folder: config.json, and sentence-transformers' length limit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from core.model_files.settings.values import Values, model_sizes
from core.models.architectures.encoder_architectures import (
    ENCODER_FORMS,
    ENCODER_TYPES,
    EncoderArchitecture,
    EncoderForm,
)
from core.models.config import EncoderActivation, EncoderParts, ModelConfig

_NO_LIMIT = 2**24  # tokens: a tokenizer's model_max_length above this means no limit
#: transformers' names of activations -> ours.
_ACTIVATIONS: dict[str, EncoderActivation] = {name: name for name in get_args(EncoderActivation)}
_ACTIVATIONS |= {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
#: Activations of MLPs with a gate in models that otherwise have BERT's parts.
_GATES: dict[str, EncoderActivation] = {"silu": "silu", "swiglu": "silu", "gelu": "gelu", "geglu": "gelu"}
#: Settings that are not implemented -> the value without effect.
_WITHOUT_EFFECT: dict[str, Any] = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
}


def encoder_of(values: Values) -> tuple[EncoderArchitecture, EncoderForm] | None:
    """Return the encoder named by a config.json and what follows the checkpoint's layers; None: it names no encoder."""
    names = values.get("architectures")
    if isinstance(names, list) and len(names) == 1 and str(names[0]) in ENCODER_FORMS:
        return ENCODER_FORMS[str(names[0])]
    row = ENCODER_TYPES.get(str(values.get("model_type"))) if names is None else None
    return None if row is None else (row, "base")


def read_encoder_config(
    settings: dict[str, Any],
    source: str,
    row: EncoderArchitecture,
    form: EncoderForm,
    *,
    dtype: str,
    num_labels: int,
    most_tokens: int | None,
) -> ModelConfig:
    """Return the configuration of an encoder.

    settings: from config.json, with the file's name `source`. num_labels: for a classifier. most_tokens: the longest
    prompt that the files allow; None = the number of positions. Errors: ModelFileError, UnsupportedModelError.
    """
    eps_key = "norm_eps" if row.is_modern else "layer_norm_eps"
    own = {row.settings[name]: value for name, value in settings.items() if name in row.settings}
    values = Values({**row.defaults, **own, **settings}, source, {"rms_norm_eps": eps_key})
    for name, plain in {**_WITHOUT_EFFECT, **row.only}.items():
        if values.get(name) not in (None, plain):
            values.refuse(name, f"only {plain!r} is")
    sizes = model_sizes(values)
    rows = sizes["max_position_embeddings"]
    is_classifier = form == "classifier"
    if row.is_modern:
        parts, more = _modern_parts(values, row, is_classifier), _modern_attention(values, sizes["num_hidden_layers"])
    elif row.is_rotary:
        parts = _gated_parts(values) if row.is_gated else _bert_parts(values, row, is_classifier, 0)
        more = {"rope_theta": _one_theta(values)}
    else:
        parts, more = _bert_parts(values, row, is_classifier, rows), {"rope_theta": 10_000.0}
        sizes["max_position_embeddings"] = rows - parts.first_position
    if most_tokens is not None:
        sizes["max_position_embeddings"] = min(most_tokens, sizes["max_position_embeddings"])
    return ModelConfig(
        architecture=f"{row.stem}Model",
        vocab_size=values.integer("vocab_size"),
        tie_word_embeddings=True,
        has_head=False,
        num_labels=num_labels if is_classifier else 0,
        bos_token_id=None,
        eos_token_ids=(),
        dtype=dtype,
        encoder=parts,
        **sizes,
        **more,
    )


def _activation(values: Values, name: str, *, has_gate: bool) -> EncoderActivation:
    known = [one for one, function in _ACTIVATIONS.items() if has_gate or function != "silu"]
    if values.get(name) not in known:
        values.refuse(name, f"{', '.join(known)} are")
    return _ACTIVATIONS[values.get(name)]


def _bert_parts(values: Values, row: EncoderArchitecture, is_classifier: bool, rows: int) -> EncoderParts:
    """rows: of the table of positions; 0 = there is none."""
    first = 0
    if row.pads_positions:
        first = values.integer("pad_token_id") + 1
        if first >= rows:
            values.fail("max_position_embeddings", f"must be more than pad_token_id + 1 = {first}, got {rows}")
    return EncoderParts(
        num_positions=rows,
        first_position=first,
        num_kinds=values.integer("type_vocab_size"),
        has_fused_qkv="layers.{}.qkv" in row.weights,
        activation=_activation(values, "hidden_act", has_gate=False),
        head=row.head if is_classifier else "none",
    )


def _gated_parts(values: Values) -> EncoderParts:
    if (name := str(values.get("hidden_act"))) not in _GATES:
        values.refuse("hidden_act", f"{', '.join(_GATES)} are")
    return EncoderParts(
        num_kinds=values.integer("type_vocab_size"),
        products_have_biases=False,
        is_gated=True,
        has_fused_gate=False,
        has_fused_qkv=True,
        activation=_GATES[name],
    )


def _one_theta(values: Values) -> float:
    """Return theta for all layers, from rope_parameters, as transformers 5 writes it, or from the setting."""
    group = values.group("rope_parameters")
    if group is not None and group.get("rope_type") not in (None, "default"):
        group.refuse("rope_type", "'default' is")
    return values.number("rope_theta", 1.0, 1e12) if group is None else group.number("rope_theta", 1.0, 1e12)


def _modern_parts(values: Values, row: EncoderArchitecture, is_classifier: bool) -> EncoderParts:
    if values.get("classifier_pooling") not in (None, "cls", "mean"):
        values.refuse("classifier_pooling", "'cls' and 'mean' are")
    if is_classifier and values.get("classifier_activation") not in (None, "gelu"):
        values.refuse("classifier_activation", "'gelu' is")
    return EncoderParts(
        norms_follow=False,
        has_biases=False,
        is_gated=True,
        has_fused_qkv=True,
        activation=_activation(values, "hidden_activation", has_gate=True),
        head=row.head if is_classifier else "none",
        head_has_biases=values.boolean("classifier_bias"),
        head_pooling="mean" if values.get("classifier_pooling") == "mean" else "cls",
    )


def _modern_attention(values: Values, num_layers: int) -> dict[str, Any]:
    """Return ModernBERT's window and rotary settings by ModelConfig's names.

    transformers 5 writes layer_types and rope_parameters; earlier versions write a period and two thetas.
    """
    names = values.get("layer_types")
    if names is None:
        period = values.integer("global_attn_every_n_layers")
        sliding = tuple(layer for layer in range(num_layers) if layer % period)
    else:
        kinds = ("full_attention", "sliding_attention")
        if not isinstance(names, list) or len(names) != num_layers or any(name not in kinds for name in names):
            values.fail("layer_types", f"must be {num_layers} names of {kinds}, got {names!r:.80}")
        sliding = tuple(layer for layer, name in enumerate(names) if name == "sliding_attention")
    theta = _theta(values, "full_attention", "global_rope_theta", 160_000.0)
    own = _theta(values, "sliding_attention", "local_rope_theta", 10_000.0)
    window = values.integer("local_attention") // 2 + 1  # the token itself, and half of the window on each side
    return {
        "rope_theta": theta,
        **({"sliding_window": window, "sliding_layers": sliding, "sliding_rope_theta": own} if sliding else {}),
    }


def _theta(values: Values, kind: str, older: str, default: float) -> float:
    """Return theta for one kind of layer. older: the setting's name in config.json before transformers 5."""
    group = values.group("rope_parameters")
    own = None if group is None else group.group(kind)
    if own is None:
        return values.number(older, 1.0, 1e12, default)
    if own.get("rope_type") not in (None, "default"):
        own.refuse("rope_type", "'default' is")
    return own.number("rope_theta", 1.0, 1e12, default)


def most_tokens_of(folder: Path, read: Callable[[Path], dict[str, Any]]) -> int | None:
    """Return the longest prompt that sentence-transformers accepts with the folder's files; None: they do not say.

    It is max_seq_length in sentence_bert_config.json, or in a file named for another model. Version 6 does not write
    it; then it is the tokenizer's model_max_length, where 1e30 means no limit. read: reads a JSON object.
    Errors: ModelFileError.
    """
    for file in sorted(folder.glob("sentence_*_config.json")):
        values = Values(read(file), str(file))
        if values.get("max_seq_length") is not None:
            return values.integer("max_seq_length")
    file = folder / "tokenizer_config.json"
    values = Values(read(file) if file.is_file() else {}, str(file))
    most = values.get("model_max_length")
    if type(most) not in (int, float) or most > _NO_LIMIT:
        return None
    return values.integer("model_max_length")
