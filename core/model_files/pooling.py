"""How a model pools, read from its files: sentence-transformers' modules, or a classifier's config.json.

Unimplemented settings in the files are refused by name, because a different pooling gives plausible but useless
vectors.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from core.model_files.load_format import open_weights
from core.model_files.settings.config_json import read_json_object
from core.models.config import ModelConfig
from core.models.encoder import Encoder
from core.models.llama import Llama
from core.models.operations.stored_matrix import StoredMatrix
from core.pooling.pooler import Activation, Dense, Method, Norm, Pooler
from ipc.errors import ConfigError, ModelFileError, UnsupportedModelError
from ipc.files.gguf import read_gguf
from ipc.files.mapped_file import map_file
from ipc.files.model_files import read_small_file
from ipc.files.safetensors import read_safetensors
from ipc.files.tokenizer_json import parse_tokenizer_json
from ipc.options.config import EngineConfig
from ipc.options.tokenizer_files import tokenizer_files_of
from ipc.tables.arrays import Doubles
from kernels.elements import to_floats

_METHODS: dict[str, Method] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_NEW_METHODS: dict[str, Method] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}
_GGUF_METHODS: dict[int, Method] = {1: "mean", 2: "cls", 3: "last"}
_TYPES = {"F32": "<f4", "F64": "<f8", "F16": "<f2"}


def pools(config: EngineConfig, path: Path, model: ModelConfig) -> bool:
    """Return whether the model pools. Errors: ConfigError for a runner that the model does not support."""
    if config.runner == "generate":
        if not model.has_head:
            raise ConfigError(f"{path} has no language model head, which runner='generate' needs; use 'auto'")
        return False
    is_given = config.runner == "pooling" or config.classifier_from_token is not None
    is_pooled = is_given or not model.has_head or (path / "modules.json").is_file() or _gguf_type(path) not in (None, 0)
    if is_pooled and config.speculative_config is not None:
        raise ConfigError("speculative_config has no use for a pooling model, which generates no tokens: leave it out")
    if model.encoder is not None and config.classifier_from_token is not None:
        raise ConfigError("classifier_from_token needs a language model head, but an encoder has none: leave it out")
    return is_pooled


def read_pooler(config: EngineConfig, path: Path, model: Llama, whole: ModelConfig) -> Pooler:
    """Return how the model in a folder or .gguf file pools. whole: the whole model's config, if `model` is a part.

    Errors: ModelFileError, UnsupportedModelError, ConfigError.
    """
    if isinstance(model, Encoder):
        return _encoder_pooler(path, model)
    return _decoder_pooler(config, path, model, whole)._replace(is_whole=not model.config.is_causal)


def _decoder_pooler(config: EngineConfig, path: Path, model: Llama, whole: ModelConfig) -> Pooler:
    hidden_size = model.config.hidden_size
    if model.classifier is not None:
        weight = to_floats(model.classifier).astype(np.float64)
        return Pooler("last", hidden_size, classifier=(Dense(weight, None),), activation=_activation(path, len(weight)))
    if config.classifier_from_token is not None:
        weight = _difference(config, path, model, whole, _named_tokens(config))
        return Pooler("last", hidden_size, classifier=(Dense(weight, None),), activation="sigmoid")
    if path.suffix == ".gguf":
        return Pooler(_gguf_method(path, "last"), hidden_size)
    projection = () if (own := model.to_embedding) is None else (Dense(to_floats(own).astype(np.float64), None),)
    if (path / "modules.json").is_file():
        if (tokens := _logit_score(path, whole.vocab_size)) is None:
            return _from_modules(path, hidden_size, projection)
        weight = _difference(config, path, model, whole, tokens)
        return Pooler("last", hidden_size, classifier=(Dense(weight, None),), activation=_activation(path, 1))
    return Pooler("last" if model.config.is_causal else "mean", hidden_size, projection)


def _gguf_type(path: Path) -> object:
    """Return the pooling_type in a GGUF file, or None if it has none or is a folder."""
    if path.suffix != ".gguf":
        return None
    metadata = read_gguf(path).metadata
    return metadata.get(f"{metadata.get('general.architecture')}.pooling_type")


def _gguf_method(path: Path, usual: Method) -> Method:
    """Return the method that a GGUF file names, or `usual` if it names none. Errors: UnsupportedModelError."""
    if (kind := _gguf_type(path)) in (None, 0):
        return usual
    if not isinstance(kind, int) or kind not in _GGUF_METHODS:
        raise UnsupportedModelError(f"{path}: pooling_type {kind!r}: supported are {list(_GGUF_METHODS)}")
    return _GGUF_METHODS[kind]


def _encoder_pooler(path: Path, model: Encoder) -> Pooler:
    """Return how an encoder pools. Without modules.json it is the mean, as in sentence-transformers."""
    config, parts, eps = model.config, model.config.encoder, model.config.rms_norm_eps
    assert parts is not None, config.architecture
    if not config.num_labels:
        plain = Pooler(_gguf_method(path, "mean"), config.hidden_size)
        pooler = _from_modules(path, config.hidden_size) if (path / "modules.json").is_file() else plain
        return pooler._replace(is_whole=True)
    head = {name: weight.astype(np.float64) for name, weight in model.label_weights.items()}
    is_tanh, bias = parts.head == "tanh", head.get("head.dense.bias")
    norm = None if is_tanh else Norm(head["head.norm.weight"], eps)
    dense = Dense(head["head.dense.weight"], bias, "tanh" if is_tanh else "gelu", norm)
    layers = dense, Dense(head["head.out.weight"], head["head.out.bias"])
    activation = _activation(path, config.num_labels)
    return Pooler(parts.head_pooling, config.hidden_size, classifier=layers, activation=activation, is_whole=True)


def _from_modules(path: Path, hidden_size: int, projection: tuple[Dense, ...] = ()) -> Pooler:
    """Return the pooling of modules.json. Errors: ModelFileError, UnsupportedModelError.

    projection: what the model multiplies its hidden states with; (): nothing. Here the pooled states are multiplied.
    """
    method: Method | None = None
    layers: list[Dense] = []
    normalises = False
    for kind, folder in _modules(path):
        if normalises or (kind != "Pooling" and method is None):
            raise UnsupportedModelError(f"{path}/modules.json: a {kind} at this position is not supported")
        match kind:
            case "Pooling":
                method = _method(folder / "config.json")
            case "Dense":
                layers.append(_dense(folder))
            case "Normalize":
                normalises = True
            case _:
                raise UnsupportedModelError(
                    f"{path}/modules.json: a module {kind} is not supported; Transformer, Pooling, Dense, Normalize, "
                    "LogitScore are"
                )
    if method is None:
        raise UnsupportedModelError(f"{path}/modules.json: there is no Pooling")
    if projection and method == "max":
        raise UnsupportedModelError(f"{path}: pooling 'max' is not supported for a model that projects its embeddings")
    width = len(projection[0].weight) if projection else hidden_size
    for layer in layers:
        if layer.weight.shape[1] != width:
            raise ModelFileError(f"{path}: a Dense takes {layer.weight.shape[1]} numbers but gets {width}")
        width = len(layer.weight)
    return Pooler(method, hidden_size, (*projection, *layers), normalises)


def _modules(path: Path) -> list[tuple[str, Path]]:
    """Return (class name, folder) of each module after the Transformer."""
    file = path / "modules.json"
    try:
        modules = json.loads(read_small_file(file).decode())
        named = [(str(module["type"]).rpartition(".")[2], path / str(module["path"])) for module in modules]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise ModelFileError(f"{file}: expected a list of objects with type and path: {error!r}") from None
    if not named or named[0][0] != "Transformer":
        raise UnsupportedModelError(f"{file}: the first module must be a Transformer, got {named[:1]}")
    if any(not folder.resolve().is_relative_to(path.resolve()) for _, folder in named):
        raise ModelFileError(f"{file}: a module is outside the model's folder")
    return named[1:]


def _method(file: Path) -> Method:
    values = read_json_object(file)
    if values.get("include_prompt") is False:
        raise UnsupportedModelError(f"{file}: include_prompt=false is not supported: prompts are pooled with the text")
    if (name := values.get("pooling_mode")) is not None:
        chosen = [str(name)]
        known = _NEW_METHODS
    else:
        chosen = [key for key, value in values.items() if key.startswith("pooling_mode_") and value is True]
        known = _METHODS
    if len(chosen) != 1 or chosen[0] not in known:
        raise UnsupportedModelError(f"{file}: pooling {chosen} is not supported; one of {list(known)} is")
    return known[chosen[0]]


def _dense(folder: Path) -> Dense:
    values, file = read_json_object(folder / "config.json"), folder / "model.safetensors"
    activation = str(values.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in ("Identity", "Tanh"):
        raise UnsupportedModelError(f"{folder}: activation {activation} is not supported; Identity and Tanh are")
    if not file.is_file():
        raise ModelFileError(f"{folder}: model.safetensors is missing; a Dense has its weights there")
    tensors = {name: _tensor(file, name) for name in read_safetensors(file)}
    if "linear.weight" not in tensors or tensors["linear.weight"].ndim != 2:
        raise ModelFileError(f"{file}: the matrix linear.weight is missing")
    return Dense(tensors["linear.weight"], tensors.get("linear.bias"), "tanh" if activation == "Tanh" else "identity")


def _tensor(file: Path, name: str) -> Doubles:
    tensor = read_safetensors(file)[name]
    with map_file(file) as data:
        raw = data[tensor.begin : tensor.end]
    if tensor.dtype == "BF16":
        numbers: Doubles = to_floats(np.frombuffer(raw, np.uint16)).astype(np.float64)
    elif tensor.dtype in _TYPES:
        numbers = np.frombuffer(raw, _TYPES[tensor.dtype]).astype(np.float64)
    else:
        raise UnsupportedModelError(
            f"{file}: tensor {name} has type {tensor.dtype}; {', '.join(_TYPES)}, BF16 are read"
        )
    return numbers.reshape(tensor.shape)


def _activation(path: Path, num_labels: int) -> Activation:
    """Return the activation for a classifier's logits: sentence-transformers' choice, or by the type of problem."""
    values: dict[str, Any] = read_json_object(path / "config.json") if path.is_dir() else {}
    own = values.get("sentence_transformers") or {}
    newer = own.get("activation_fn") if isinstance(own, dict) else None
    name = str(newer or values.get("sbert_ce_default_activation_function") or "")
    if name.endswith("Identity") or (not name and values.get("problem_type") == "regression"):
        return "none"
    if name.endswith("Sigmoid") or values.get("problem_type") == "multi_label_classification":
        return "sigmoid"
    return "sigmoid" if num_labels == 1 else "softmax"


def _logit_score(path: Path, vocab_size: int) -> tuple[int | None, int] | None:
    """Return the tokens (no, yes) of a LogitScore, which follows the Transformer (sentence-transformers 6).

    None: there is no such module. Without "no", the score is the logit of "yes". Errors: ModelFileError,
    UnsupportedModelError.
    """
    kinds = _modules(path)
    if not kinds or kinds[0][0] != "LogitScore":
        return None
    if len(kinds) > 1:
        raise UnsupportedModelError(f"{path}/modules.json: a {kinds[1][0]} after a LogitScore is not supported")
    file = kinds[0][1] / "config.json"
    values = read_json_object(file)
    no, yes = (values.get(f"{name}_token_id") for name in ("false", "true"))
    if not all(type(token) is int and 0 <= token < vocab_size for token in ([yes] if no is None else [no, yes])):
        raise ModelFileError(f"{file}: true_token_id and false_token_id must be tokens, got {yes!r:.40} and {no!r:.40}")
    return no, int(yes or 0)


def _named_tokens(config: EngineConfig) -> tuple[int, int]:
    """Return the tokens of classifier_from_token. Errors: ConfigError."""
    names = (config.classifier_from_token or "").split(",")
    if len(names) != 2 or not all(names):
        raise ConfigError(f"classifier_from_token must be two tokens, NO,YES; got {config.classifier_from_token!r}")
    content = tokenizer_files_of(config).get("tokenizer.json")
    if content is None:
        raise ConfigError("classifier_from_token needs the model's tokenizer.json")
    tokenizer = parse_tokenizer_json(content)
    ids = [tokenizer.token_to_id(name) for name in names]
    for name, token in zip(names, ids, strict=True):
        if token is None:
            raise ConfigError(f"classifier_from_token: {name!r} is not a token of this model")
    no, yes = (int(token or 0) for token in ids)
    return no, yes


def _difference(
    config: EngineConfig, path: Path, model: Llama, whole: ModelConfig, tokens: tuple[int | None, int]
) -> Doubles:
    """Return the weights [1, hidden] of a classifier whose logit is the second token's, minus the first's if any."""
    no, yes = tokens
    ids = [yes] if no is None else [no, yes]
    head = "model.embed_tokens.weight" if whole.tie_word_embeddings else "lm_head.weight"
    tensors = open_weights(config.load_format, path, whole, model.dtype, reads=lambda name: name == head).tensors
    weight = next(weight for _, weight in tensors)
    matrix = StoredMatrix.of(weight) if isinstance(weight, np.ndarray) else weight
    rows = to_floats(matrix.dense(model.dtype)[np.array(ids, np.int64)]).astype(np.float64)
    return rows if no is None else rows[1:] - rows[:1]
