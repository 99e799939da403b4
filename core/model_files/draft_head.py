"""load_eagle3, load_mtp: load the draft head named by speculative_config, from a folder or the model's own files.

model: the config of the whole model. The target may be a part of it; then `ends` has embeddings and head.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from core.model_files.load_format import made_up
from core.model_files.settings.config_json import decoder_config, read_json_object
from core.model_files.settings.values import Values
from core.model_files.tensors.weight_shapes import layer_shapes
from core.model_files.tensors.weights import load_further_layer, load_tensors, read_integers
from core.models.architectures.architecture import MtpRow
from core.models.architectures.by_name import ARCHITECTURES
from core.models.config import ModelConfig
from core.models.draft_head import DraftHead, Eagle3Parts, HeadConfig, HeadWeights, ModelEnds, head_shapes
from core.models.llama import Llama
from core.models.operations.head_place import TappedOperations
from ipc.errors import ConfigError, ModelFileError
from ipc.files.gguf import read_gguf
from ipc.files.safetensors import read_safetensors_folder
from ipc.tables.arrays import Ints

#: Names in config.json's architectures: EAGLE's own folders use the first, others one of the rest.
_EAGLE3_NAMES = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
#: Settings of EAGLE-3 heads that are not implemented -> the value without effect.
_WITHOUT_EFFECT: dict[str, Any] = {
    "parallel_drafting": False,
    "norm_output": False,
    "logit_scale": 1,
    "per_layer_config": None,
}
#: Tensors in an EAGLE-3 folder that are read elsewhere or not at all: t2d has the same information as d2t.
_EAGLE3_REST = re.compile(r"(.*\.)?(d2t|t2d|rotary_emb\.inv_freq)|embed_tokens\.weight")
_LAYER = "model.layers.0."
#: Like MtpRow.names, for the names in the GGUF file of a model of one layer.
_GGUF_NAMES = {
    "blk.{layers}.nextn.eh_proj.": "blk.0.input_proj.",
    "blk.{layers}.nextn.enorm.": "blk.0.token_layernorm.",
    "blk.{layers}.nextn.hnorm.": "blk.0.hidden_layernorm.",
    "blk.{layers}.nextn.shared_head_norm.": "output_norm.",
    "blk.{layers}.nextn.shared_head_head.": "",
    "blk.{layers}.nextn.embed_tokens.": "",
    "blk.{layers}.": "blk.0.",
}


def load_eagle3(
    folder: Path, model: ModelConfig, target: Llama, *, is_made_up: bool, ends: ModelEnds | None = None
) -> DraftHead:
    """Load an EAGLE-3 head from its folder. is_made_up: use made-up weights, and read only its config.json.

    ends: see DraftHead. Errors: ModelFileError, UnsupportedModelError; ConfigError if it is not a head for this model.
    """
    _check_target(target, "eagle3")
    config = _eagle3_config(folder, model, is_made_up)
    shapes = head_shapes(config, layer_shapes(config.layer))
    if is_made_up:
        return DraftHead(config, HeadWeights(made_up(shapes, target.dtype), _made_up_ids(config)), target, ends)
    names = _eagle3_names(shapes, folder)
    tensors = load_tensors(folder, names, shapes, _EAGLE3_REST, target.dtype)
    return DraftHead(config, HeadWeights(tensors, _token_ids(folder, config)), target, ends)


def load_mtp(
    folder: Path, model: ModelConfig, target: Llama, *, is_made_up: bool, ends: ModelEnds | None = None
) -> DraftHead:
    """Load a model's own layer for multi-token prediction; the first one if it has several.

    ends: see DraftHead. Errors: those of load_eagle3(); ConfigError if the model has no such layer.
    """
    _check_target(target, "mtp")
    row = ARCHITECTURES[model.architecture].mtp
    if row is None:
        raise _no_layer(folder)
    layer = _mtp_layer(model, row)
    config = HeadConfig(layer=layer, taps=(model.num_hidden_layers,), tap_width=model.hidden_size, mtp=row)
    shapes = head_shapes(config, layer_shapes(layer))
    is_gguf = folder.suffix == ".gguf"
    if is_made_up:
        if not (_num_in_gguf(folder) if is_gguf else _num_in_folder(folder, row)):
            raise _no_layer(folder)
        return DraftHead(config, HeadWeights(made_up(shapes, target.dtype), None), target, ends)
    names = _GGUF_NAMES if is_gguf else row.names
    starts = {start.format(layers=model.num_hidden_layers): ours for start, ours in names.items()}

    def our_name(name: str) -> str:
        start = next((start for start in starts if name.startswith(start)), "")
        return starts[start] + name.removeprefix(start) if starts.get(start) else ""

    tensors = load_further_layer(folder, layer, shapes, our_name, target.dtype)
    if tensors is None:
        raise _no_layer(folder)
    return DraftHead(config, HeadWeights(tensors, None), target, ends)


def head_taps(folder: Path, method: str, model: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of layers after which a head of this method reads the model's hidden states.

    Errors: those of load_eagle3().
    """
    if method == "mtp":
        return (model.num_hidden_layers,)
    source = folder / "config.json"
    return _taps(Values(read_json_object(source), str(source)), model.num_hidden_layers)


def _num_in_folder(folder: Path, row: MtpRow) -> Any:
    """Return what config.json says about the number of such layers."""
    settings = read_json_object(folder / "config.json")
    text = settings.get("text_config")
    return (text if isinstance(text, Mapping) else settings).get(row.setting, row.default)


def _num_in_gguf(path: Path) -> Any:
    header = read_gguf(path)
    return header.metadata.get(f"{header.metadata.get('general.architecture')}.nextn_predict_layers")


def _mtp_layer(model: ModelConfig, row: MtpRow) -> ModelConfig:
    """Return the config of a model whose only layer is like the one for multi-token prediction."""
    experts = None if row.is_dense else model.experts
    return msgspec.structs.replace(
        model,
        num_hidden_layers=1,
        sliding_layers=(0,) if model.sliding_layers else (),
        unrotated_layers=(),
        recurrent=None,
        vision=None,
        experts=None if experts is None else msgspec.structs.replace(experts, dense_layers=()),
    )


def _no_layer(folder: Path) -> ConfigError:
    names = ", ".join(name for name, row in ARCHITECTURES.items() if row.mtp is not None)
    return ConfigError(
        f"speculative_config: method 'mtp' does not fit {folder}: it has no multi-token prediction layer; "
        f"architectures whose files may have such a layer are {names}"
    )


def _check_target(target: Llama, method: str) -> None:
    if target.config.streams is not None:
        raise ConfigError(
            f"speculative_config: method {method!r} reads one stream of hidden states, and those of "
            f"{target.config.architecture} are in several: use method 'ngram', 'suffix' or 'draft_model'"
        )
    if not isinstance(target.operations, TappedOperations):
        raise ConfigError(
            f"speculative_config: method {method!r} needs the C kernels: install a C compiler or a wheel, and leave "
            "numerics and cpu_kernels out"
        )


# --- EAGLE-3 --------------------------------------------------------------------------------------------------------


def _eagle3_config(folder: Path, model: ModelConfig, is_made_up: bool) -> HeadConfig:
    source = folder / "config.json"
    values = Values(read_json_object(source), str(source))
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _EAGLE3_NAMES:
        values.refuse("architectures", f"of EAGLE-3 heads {', '.join(_EAGLE3_NAMES)} are")
    for name, plain in _WITHOUT_EFFECT.items():
        if values.get(name) not in (None, plain):
            values.refuse(name, f"only {plain} is")
    layer = decoder_config(folder, values, ARCHITECTURES["LlamaForCausalLM"], "causal")
    if layer.num_hidden_layers != 1:
        values.refuse("num_hidden_layers", "heads of 1 layer are")
    if layer.vocab_size != model.vocab_size:
        raise ConfigError(
            f"speculative_config: the head {folder} is for a model with {layer.vocab_size} tokens, but the model has "
            f"{model.vocab_size}: use a head for this model"
        )
    has_embeddings = not is_made_up and _tensor_names(folder) >= {"embed_tokens.weight"}
    width = values.get("target_hidden_size") or layer.hidden_size
    if width != model.hidden_size or (not has_embeddings and layer.hidden_size != model.hidden_size):
        raise ConfigError(
            f"speculative_config: the head {folder} reads hidden states of {width} numbers, but the model's have "
            f"{model.hidden_size}: use a head for this model"
        )
    draft_vocab_size = values.get("draft_vocab_size") or layer.vocab_size
    if isinstance(draft_vocab_size, bool) or not isinstance(draft_vocab_size, int) or draft_vocab_size < 1:
        values.fail("draft_vocab_size", f"must be an integer of at least 1; got {draft_vocab_size!r:.80}")
    return HeadConfig(
        layer=layer,
        taps=_taps(values, model.num_hidden_layers),
        tap_width=model.hidden_size,
        eagle3=Eagle3Parts(
            draft_vocab_size=draft_vocab_size,
            has_embeddings=has_embeddings,
            norms_taps=values.boolean("norm_before_fc"),
            norm_is_residual=values.boolean("norm_before_residual"),
        ),
    )


def _taps(values: Values, num_layers: int) -> tuple[int, ...]:
    """Return the numbers of the model's layers after which the head reads the hidden state.

    Files count in two ways. If the first number is 1, they name the layers whose output is read, from 0; otherwise the
    layers that read it, which is the number of layers before (SGLang's rule, sgl-project/sglang#25454). Without numbers
    EAGLE's defaults apply: 2, the middle, and 3 before the last.
    """
    group = values.get("eagle_config")
    own = group.get("eagle_aux_hidden_state_layer_ids") if isinstance(group, Mapping) else None
    ids = values.get("eagle_aux_hidden_state_layer_ids") or own or [2, num_layers // 2, num_layers - 3]
    if not isinstance(ids, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        values.fail("eagle_aux_hidden_state_layer_ids", f"must be a list of integers; got {ids!r:.80}")
    taps = tuple(one + 1 if ids[0] == 1 else one for one in ids)
    if not all(0 < one <= num_layers for one in taps):
        values.fail("eagle_aux_hidden_state_layer_ids", f"are {ids}, but the model has {num_layers} layers")
    return taps


def _eagle3_names(shapes: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the names in the folder's files: midlayer.* or layers.0.* for the layer, and no prefix for the rest."""
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in _tensor_names(folder)) else "layers.0."
    own = {name: name.removeprefix("model.") for name in shapes}
    return own | {name: prefix + name.removeprefix(_LAYER) for name in shapes if name.startswith(_LAYER)}


def _tensor_names(folder: Path) -> set[str]:
    return {name for tensors in read_safetensors_folder(folder).values() for name in tensors}


def _token_ids(folder: Path, config: HeadConfig) -> Ints | None:
    """Return the model's ids of the head's tokens. d2t holds the difference of each from its id in the head."""
    assert config.eagle3 is not None, config
    count, size = config.eagle3.draft_vocab_size, config.layer.vocab_size
    distances = read_integers(folder, "d2t")
    if distances is None:
        if count != size:
            raise ModelFileError(f"{folder}: tensor d2t is missing; the head predicts {count} of {size} tokens")
        return None
    if distances.shape != (count,):
        raise ModelFileError(f"{folder}: tensor d2t has {distances.size} numbers; the config says {count}")
    ids: Ints = np.arange(count) + distances
    if ids.min() < 0 or ids.max() >= size or len(np.unique(ids)) < count:
        raise ModelFileError(f"{folder}: tensor d2t names a token twice, or one outside the {size} tokens")
    return ids


def _made_up_ids(config: HeadConfig) -> Ints | None:
    assert config.eagle3 is not None, config
    count, size = config.eagle3.draft_vocab_size, config.layer.vocab_size
    return None if count == size else np.arange(count) * (size // count)
