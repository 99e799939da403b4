"""ModelConfig: the shape of a model, read from config.json or from GGUF metadata and checked in full.

Only the Llama architecture is known. Whatever would change the arithmetic and is not implemented is refused by name.
"""

import json
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.gguf import GgufHeader, read_gguf
from ipc.model_files import read_small_file

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and constants of one model; names are transformers'."""

    architecture: str  # one of SUPPORTED_ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    dtype: str  # torch's name of the weights' type in the file; quantized blocks hold float32


#: Lowest and highest sane values. The upper ends keep every product of two within 64 bits.
_RANGES: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "num_hidden_layers": (1, 2**12),
    "num_attention_heads": (1, 2**12),
    "num_key_value_heads": (1, 2**12),
    "head_dim": (2, 2**12),
    "max_position_embeddings": (1, 2**24),
}

_GGUF_KEYS = {
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.attention.key_length",
    "max_position_embeddings": "llama.context_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
    "vocab_size": "llama.vocab_size",
}
_GGUF_DTYPES = {"F16": "float16", "BF16": "bfloat16"}


def read_model_config(path: Path) -> ModelConfig:
    """The configuration of a model folder or .gguf file, as ipc.model_files.resolve_model gives them.

    Errors: ModelFileError naming the key for a missing or senseless value; UnsupportedModelError naming what this
    version cannot run.
    """
    return _from_gguf(path) if path.suffix == ".gguf" else _from_folder(path)


class _Values:
    """Checked access to a file's settings; keys are reported as the file spells them."""

    def __init__(self, values: dict[str, Any], source: str, keys: dict[str, str] | None = None) -> None:
        self.values = values
        self.source = source
        self._keys = keys or {}

    def key(self, name: str) -> str:
        return self._keys.get(name, name)

    def fail(self, name: str, what: str) -> NoReturn:
        raise ModelFileError(f"{self.source}: {self.key(name)} {what}")

    def refuse(self, name: str, supported: str) -> NoReturn:
        value = self.values.get(self.key(name))
        raise UnsupportedModelError(f"{self.source}: {self.key(name)}={value!r:.100} is not supported; {supported}")

    def integer(self, name: str, default: int | None = None) -> int:
        low, high = _RANGES[name]
        value = self.values.get(self.key(name))
        if value is None:
            value = default
        if value is None:
            self.fail(name, f"is missing; expected an integer from {low} to {high}")
        if type(value) is not int or not low <= value <= high:
            self.fail(name, f"must be an integer from {low} to {high}, got {value!r:.80}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """Both ends are allowed; a NaN is not."""
        value = self.values.get(self.key(name))
        if value is None:
            value = default
        if value is None:
            self.fail(name, f"is missing; expected a number from {low:g} to {high:g}")
        if type(value) not in (int, float) or not low <= value <= high:
            self.fail(name, f"must be a number from {low:g} to {high:g}, got {value!r:.80}")
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self.values.get(self.key(name))
        if value is not None and type(value) is not bool:
            self.fail(name, f"must be true or false, got {value!r:.80}")
        return value is True

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """None, one id or a list of them."""
        value = self.values.get(self.key(name))
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                self.fail(name, f"must be token ids below vocab_size={vocab_size}, got {value!r:.80}")
        return tuple(ids)


def _model_config(values: _Values, **rest: Any) -> ModelConfig:
    """Read and check the sizes, which the two formats share; `rest` has the other fields."""
    heads = values.integer("num_attention_heads")
    kv_heads = values.integer("num_key_value_heads", heads)
    hidden_size = values.integer("hidden_size")
    if heads % kv_heads:
        values.fail("num_key_value_heads", f"must divide {values.key('num_attention_heads')}={heads}, got {kv_heads}")
    head_dim = values.values.get(values.key("head_dim"))
    if head_dim is None and hidden_size % heads:
        values.fail("hidden_size", f"must be a multiple of {values.key('num_attention_heads')}={heads}: {hidden_size}")
    head_dim = values.integer("head_dim", hidden_size // heads)
    if head_dim % 2:
        values.fail("head_dim", f"must be even, for rotary embedding; got {head_dim}")
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=values.integer("intermediate_size"),
        num_hidden_layers=values.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=values.number("rms_norm_eps", 1e-12, 0.1),
        max_position_embeddings=values.integer("max_position_embeddings"),
        **rest,
    )


# --- a Hugging Face folder ----------------------------------------------------------------------------------------


def _from_folder(folder: Path) -> ModelConfig:
    values = _Values(_read_json(folder / "config.json"), str(folder / "config.json"))
    architecture = _check_architecture(values)
    for name in ("attention_bias", "mlp_bias"):
        if values.boolean(name):
            values.refuse(name, "only false is")
    if values.values.get("hidden_act", "silu") != "silu":
        values.refuse("hidden_act", "only 'silu' is")
    if values.values.get("quantization_config") is not None:
        values.refuse("quantization_config", "safetensors weights must be F32, F16 or BF16")
    rope_theta = _rope_theta(values)
    vocab_size = values.integer("vocab_size")
    eos = values.token_ids("eos_token_id", vocab_size)
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos += _Values(_read_json(generation), str(generation)).token_ids("eos_token_id", vocab_size)
    bos = values.token_ids("bos_token_id", vocab_size)
    dtype = values.values.get("dtype", values.values.get("torch_dtype")) or "float32"
    if dtype not in ("float32", "float16", "bfloat16"):
        values.fail("dtype", f"must be float32, float16 or bfloat16, got {dtype!r:.80}")
    return _model_config(
        values,
        architecture=architecture,
        vocab_size=vocab_size,
        rope_theta=rope_theta,
        tie_word_embeddings=values.boolean("tie_word_embeddings"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        dtype=dtype,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_small_file(path).decode())
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _check_architecture(values: _Values) -> str:
    """A config saved from a bare LlamaConfig has a model_type but no architectures."""
    names = values.values.get("architectures")
    model_type = values.values.get("model_type")
    if names is None and model_type is None:
        values.fail("architectures", f"is missing; supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
    if names is None and model_type == "llama":
        return "LlamaForCausalLM"
    if not isinstance(names, list) or len(names) != 1 or names[0] not in SUPPORTED_ARCHITECTURES:
        name = "model_type" if names is None else "architectures"
        values.refuse(name, f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
    return str(names[0])


def _rope_theta(values: _Values) -> float:
    """transformers 5 writes rope_parameters, with theta and the scaling in it; earlier ones write them as two keys."""
    parameters: dict[str, Any] = {"rope_theta": values.values.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        group = values.values.get(name)
        if group is None:
            continue
        if not isinstance(group, dict):
            values.fail(name, f"must be an object, got {group!r:.80}")
        if group.get("rope_type", group.get("type", "default")) != "default":
            values.refuse(name, "only the type 'default' is")
        parameters.update(group)
    if parameters.get("partial_rotary_factor", values.values.get("partial_rotary_factor")) not in (None, 1):
        values.refuse("rope_parameters" if "rope_parameters" in values.values else "partial_rotary_factor", "only 1 is")
    return _Values(parameters, values.source).number("rope_theta", 1.0, 1e12, 10_000.0)


# --- a GGUF file --------------------------------------------------------------------------------------------------


def _from_gguf(path: Path) -> ModelConfig:
    header = read_gguf(path)
    values = _Values(header.metadata, str(path), _GGUF_KEYS)
    architecture = header.metadata.get("general.architecture")
    if architecture is None:
        values.fail("general.architecture", "is missing; supported is 'llama'")
    if architecture != "llama":
        values.refuse("general.architecture", "supported is 'llama'")
    _refuse_gguf_features(values, header)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    vocab_size = values.integer("vocab_size", len(tokens) if isinstance(tokens, list) else None)
    eos: tuple[int, ...] = ()
    for name in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
        eos += values.token_ids(name, vocab_size)
    bos = values.token_ids("tokenizer.ggml.bos_token_id", vocab_size)
    matrix = header.tensors.get("blk.0.attn_q.weight")
    config = _model_config(
        values,
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        rope_theta=values.number("rope_theta", 1.0, 1e12, 10_000.0),
        tie_word_embeddings="output.weight" not in header.tensors,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        dtype=_GGUF_DTYPES.get(matrix.type, "float32") if matrix else "float32",
    )
    for name in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if header.metadata.get(name, config.head_dim) != config.head_dim:
            values.refuse(name, f"only the head dimension {config.head_dim} is")
    return config


def _refuse_gguf_features(values: _Values, header: GgufHeader) -> None:
    if "rope_freqs.weight" in header.tensors:
        raise UnsupportedModelError(
            f"{values.source}: tensor rope_freqs.weight (scaled rotary embedding) is not supported"
        )
    for name, plain in (
        ("llama.rope.scaling.type", "none"),
        ("llama.rope.scaling.factor", 1.0),
        ("llama.rope.scale_linear", 1.0),
        ("llama.expert_count", 0),
        ("llama.attention.sliding_window", 0),
    ):
        if values.values.get(name, plain) != plain:
            values.refuse(name, f"only {plain!r} is")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if isinstance(values.values.get(values.key(name)), list):
            values.refuse(name, "all layers must be alike")
