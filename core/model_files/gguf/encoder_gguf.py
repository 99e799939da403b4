"""ModelConfig of an encoder from its GGUF file, as written by llama.cpp's converter."""

from pathlib import Path
from typing import Any

from core.model_files.settings.encoder_config import read_encoder_config
from core.model_files.settings.values import Values
from core.models.architectures.encoder_architectures import GGUF_ENCODERS
from core.models.config import ModelConfig
from ipc.files.gguf import GgufHeader

#: Setting -> its key, without the architecture's prefix.
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DTYPES = {"F16": "float16", "BF16": "bfloat16"}


def gguf_encoder_config(path: Path, header: GgufHeader, name: str) -> ModelConfig:
    """Return the configuration of an encoder. name: its architecture in the file, one of GGUF_ENCODERS.

    The shapes of its tables give the numbers of words, positions and kinds of tokens. Errors: ModelFileError,
    UnsupportedModelError.
    """
    row = GGUF_ENCODERS[name]
    values = Values(header.metadata, str(path), {key: f"{name}.{rest}" for key, rest in _KEYS.items()})
    if header.metadata.get(f"{name}.attention.causal", False) is not False:
        values.refuse(f"{name}.attention.causal", "only false is")
    settings: dict[str, Any] = {key: values.integer(key) for key in _SIZES}
    if row.is_rotary:
        settings["max_position_embeddings"] = values.integer("max_position_embeddings")
        settings["rope_theta"] = values.number("rope_theta", 1.0, 1e12, row.defaults["rope_theta"])
    eps = values.number("layer_norm_eps", 0.0, 1.0, row.defaults["layer_norm_eps"])
    settings["layer_norm_eps"] = float(f"{eps:.7g}")  # the file's float32 is the nearest one to the model's 1e-12
    for key, our_stem in (
        ("vocab_size", "embeddings.words"),
        ("max_position_embeddings", "embeddings.positions"),
        ("type_vocab_size", "embeddings.kinds"),
    ):
        if our_stem not in row.gguf_weights:
            continue
        tensor = header.tensors.get(f"{row.gguf_weights[our_stem]}.weight")
        if tensor is None:
            values.fail(f"{row.gguf_weights[our_stem]}.weight", "is missing; an encoder has this tensor")
        settings[key] = tensor.shape[0]
    matrix = header.tensors.get(f"{row.gguf_weights['layers.{}.o'].format(0)}.weight")
    return read_encoder_config(
        settings,
        str(path),
        row,
        "base",
        dtype=_DTYPES.get(matrix.type, "float32") if matrix else "float32",
        num_labels=0,
        most_tokens=None,
    )
