"""load_assistant: loads the assistant named by speculative_config, which reads a model's states, K and V."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from core.model_files.gguf.config_gguf import gguf_decoder_config
from core.model_files.load_format import made_up
from core.model_files.model_config import ASSISTANTS
from core.model_files.settings.config_json import decoder_config, read_json_object
from core.model_files.settings.values import Values
from core.model_files.tensors.weight_shapes import expected_shapes
from core.model_files.tensors.weights import load_further_layer, read_integers
from core.models.architectures.by_name import ARCHITECTURES
from core.models.assistant import Assistant, AssistantConfig, AssistantWeights, TokenClusters, assistant_shapes
from core.models.config import ModelConfig
from core.models.draft_head import ModelEnds
from core.models.llama import Llama, embedding_scale
from core.models.operations.cpu_operations import CpuOperations
from core.models.operations.tensor import Operation
from core.models.parts.rank import Rank
from ipc.errors import ConfigError, ModelFileError
from ipc.files.gguf import read_gguf
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig
from ipc.tables.arrays import Ints
from kernels.elements import Dtype

#: Names in files that are not those of the layers' model -> what they become, and "" for tensors that are not read.
_OWN_NAMES = {
    "pre_projection.weight": "model.layers.0.pre_projection.weight",
    "post_projection.weight": "model.layers.0.post_projection.weight",
    "masked_embedding.centroids.weight": "model.layers.0.centroids.weight",
    "masked_embedding.token_ordering": "",
    "lm_head.weight": "",
    # in GGUF files, which do not say how many clusters are chosen
    "nextn.pre_projection.weight": "blk.0.pre_projection.weight",
    "nextn.post_projection.weight": "blk.0.post_projection.weight",
    "masked_embd_centroids.weight": "",
    "masked_embd_ordering": "",
}
#: general.architecture of an assistant, and of a model with such layers.
_GGUF_NAMES = "gemma4-assistant", "gemma4"
#: Settings of GGUF files that say that no layer has K and V.
_GGUF_SHARING = ("attention.shared_kv_layers", "nextn_predict_layers")
_GGUF_WIDTH = "embedding_length_out"


def is_assistant(path: Path) -> bool:
    """Return whether a folder or a GGUF file has an assistant. Errors: ModelFileError, UnsupportedModelError."""
    if path.suffix == ".gguf":
        return read_gguf(path).metadata.get("general.architecture") == _GGUF_NAMES[0]
    source = path / "config.json"
    return source.is_file() and _name(read_json_object(source)) in ASSISTANTS


def has_assistant(config: EngineConfig) -> bool:
    """Return whether an assistant makes an engine's drafts. Errors: those of is_assistant() and resolve_model()."""
    settings = config.speculative_config
    if settings is None or not settings.runs_head or settings.model is None:
        return False
    return is_assistant(resolve_model(settings.model))


def _name(settings: dict[str, Any]) -> str:
    names = settings.get("architectures")
    return str(names[0]) if isinstance(names, list) and len(names) == 1 else ""


class Assisted(NamedTuple):
    """What an assistant is for: the model, or a process's part of it.

    sizes: of the whole model. rank: see Assistant. ends: the whole model's; None: those of `model` are whole, or not
    used.
    """

    model: Llama
    sizes: ModelConfig
    rank: Rank | None = None
    ends: ModelEnds | None = None


def load_assistant(folder: Path, assisted: Assisted, is_made_up: bool) -> Assistant:
    """Load an assistant from its folder or GGUF file, and tap the model's hidden states for it.

    is_made_up: use made-up weights, and read only its settings. Errors: ModelFileError, UnsupportedModelError;
    ConfigError if it is not one for this model.
    """
    target, sizes = assisted.model, assisted.sizes
    if not isinstance(target.operations, CpuOperations):
        raise ConfigError(
            f"speculative_config: the assistant {folder} needs the C kernels: install a C compiler or a wheel, and "
            "leave numerics and cpu_kernels out"
        )
    config = _config(folder, assisted)
    if assisted.rank is not None and assisted.rank.shard.size > (most := config.own.num_attention_heads):
        raise ConfigError(
            f"tensor_parallel_size={assisted.rank.shard.size} is more than the {most} query heads of the assistant "
            f"{folder}: use at most {most}"
        )
    shapes = assistant_shapes(config, expected_shapes(config.own), sizes.hidden_size)
    if is_made_up:
        ids = None if config.clusters is None else np.arange(config.own.vocab_size)
        weights = AssistantWeights(made_up(shapes, target.dtype), ids)
    else:
        ids = None if config.clusters is None else _token_ids(folder, config.own.vocab_size)
        tensors = load_further_layer(folder, config.own, shapes, lambda name: _OWN_NAMES.get(name, name), target.dtype)
        assert tensors is not None, folder
        weights = AssistantWeights(tensors, ids)
    embedding = None if assisted.ends is None else _scaled(assisted.ends.embedding(), sizes, target.dtype)
    target.tap((sizes.num_hidden_layers,))
    return Assistant(config, weights, target, rank=assisted.rank, embedding=embedding)


def _scaled(embedding: Operation, sizes: ModelConfig, dtype: Dtype) -> Operation:
    scale = np.float32(embedding_scale(sizes, dtype))
    return lambda ids: embedding(ids) * scale


def _config(folder: Path, assisted: Assisted) -> AssistantConfig:
    if folder.suffix == ".gguf":
        return _gguf_config(folder, assisted)
    source = folder / "config.json"
    values = Values(read_json_object(source), str(source))
    text = values.group("text_config")
    if text is None:
        values.fail("text_config", "is missing; expected the settings of the assistant's layers")
    row = ARCHITECTURES[ASSISTANTS[_name(values.values)]]
    text.values = {**text.values, "num_kv_shared_layers": 0, "tie_word_embeddings": True}
    own = decoder_config(folder, text, row, "causal")
    for name, has in {"hidden_size_per_layer_input": own.per_layer, "enable_moe_block": own.experts}.items():
        if has is not None:
            text.refuse(name, "assistants without it are")
    own = _on(assisted, own, values.integer("backbone_hidden_size"), folder)
    return AssistantConfig(own=own, clusters=_clusters(values, own.vocab_size))


def _gguf_config(path: Path, assisted: Assisted) -> AssistantConfig:
    """Return the config of a GGUF file: that of a model whose layers have K and V, but for what it says of these."""
    header, (name, base) = read_gguf(path), _GGUF_NAMES
    metadata = {
        key.replace(f"{name}.", f"{base}.", 1): value
        for key, value in header.metadata.items()
        if not key.endswith(_GGUF_SHARING)
    }
    own = gguf_decoder_config(
        path, msgspec.structs.replace(header, metadata={**metadata, "general.architecture": base})
    )
    values = Values(header.metadata, str(path), {_GGUF_WIDTH: f"{name}.{_GGUF_WIDTH}"})
    return AssistantConfig(own=_on(assisted, own, values.integer(_GGUF_WIDTH), path))


def _on(assisted: Assisted, own: ModelConfig, width: int, folder: Path) -> ModelConfig:
    """Return the config of the assistant's layers, which read K and V of the last layers of the model that have any.

    width: of the hidden states that it reads. Errors: ConfigError if the model's are others, or in another stage.
    """
    model, part = assisted.sizes, assisted.model.config
    num_before = model.num_hidden_layers - part.num_hidden_layers  # layers of earlier stages
    if width != model.hidden_size:
        raise _misfit(folder, f"reads hidden states of {width} numbers, but the model's have {model.hidden_size}")
    if own.vocab_size != model.vocab_size:
        raise _misfit(folder, f"is for a model with {own.vocab_size} tokens, but the model has {model.vocab_size}")
    places = list[int]()
    for sliding in (False, True):
        of_kind = [layer for layer in range(own.num_hidden_layers) if (layer in own.sliding_layers) == sliding]
        having = range(model.num_hidden_layers - model.num_shared_layers)
        lenders = [layer for layer in having if (layer in model.sliding_layers) == sliding]
        if not of_kind:
            places.append(0)
            continue
        kind = "with a window" if sliding else "that see all tokens"
        if not lenders or model.recurrent is not None or model.latent is not None:
            raise _misfit(folder, f"reads K and V of layers {kind}, which the model does not have")
        heads, found = own.heads_of(of_kind[0]), model.heads_of(lenders[-1])
        if heads != found:
            raise _misfit(
                folder,
                f"reads K and V of {tuple(heads)} heads and numbers in layers {kind}; the model's: {tuple(found)}",
            )
        if lenders[-1] < num_before:
            raise ConfigError(
                f"speculative_config: the assistant {folder} reads K and V of layer {lenders[-1]}, which is not in the "
                "last of the stages: use fewer with pipeline_parallel_size"
            )
        places.append(part.place_of(lenders[-1] - num_before))
    full, of_window = places
    return msgspec.structs.replace(
        own,
        num_shared_layers=own.num_hidden_layers,
        lent_places=(full, of_window),
        # As in transformers, a window is that of the token before the last one, and one token more.
        sliding_window=own.sliding_window and own.sliding_window + 1,
    )


def _clusters(values: Values, vocab_size: int) -> TokenClusters | None:
    if not values.boolean("use_ordered_embeddings"):
        return None
    count, chosen = values.integer("num_centroids"), values.integer("centroid_intermediate_top_k")
    if vocab_size % count:
        values.fail("num_centroids", f"must divide the {vocab_size} tokens; got {count}")
    if chosen > count:
        values.fail("centroid_intermediate_top_k", f"must be at most num_centroids={count}; got {chosen}")
    return TokenClusters(num_clusters=count, num_chosen=chosen)


def _misfit(folder: Path, what: str) -> ConfigError:
    return ConfigError(f"speculative_config: the assistant {folder} {what}: use the one of this model")


def _token_ids(folder: Path, vocab_size: int) -> Ints:
    """Return the tokens cluster by cluster. Errors: ModelFileError."""
    name = "masked_embedding.token_ordering"
    ids = read_integers(folder, name)
    if ids is None:
        raise ModelFileError(f"{folder}: tensor {name} is missing")
    if ids.shape != (vocab_size,) or not np.array_equal(np.sort(ids), np.arange(vocab_size)):
        raise ModelFileError(f"{folder}: tensor {name} must have each of the {vocab_size} tokens once")
    return ids
