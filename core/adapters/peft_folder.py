"""Adapters as saved by PEFT: a folder with adapter_config.json and adapter_model.safetensors."""

import json
import math
import mmap
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from core.adapters.adapter import MAX_SCALE, AdapterWeights, checked_weights
from core.adapters.file_matrix import FileMatrix, model_matrices
from core.adapters.name_patterns import NamePatterns
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.mapped_file import map_file
from ipc.files.model_files import read_small_file
from ipc.files.safetensors import SafetensorsTensor, read_safetensors
from kernels.elements import BFLOAT16, FLOAT16, FLOAT32, Numbers
from kernels.low_rank import LowRank

WEIGHTS_FILE = "adapter_model.safetensors"
_DTYPES = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}
#: base_model.model. and the name of the matrix; ".default" is PEFT's name for an adapter in memory. A and B of a table
#: have shapes like those of a linear layer: [rank, rows] and [width, rank].
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<matrix>.+)\.lora_(?:(?P<part>[AB])(?:\.default)?\.weight"
    r"|embedding_(?P<table>[AB])(?:\.default)?)"
)
_OF_TABLES = (
    "of tables, adapters may change only those of words and of kinds of tokens of an encoder, and only with device=cpu"
)


def read_peft_folder(
    folder: Path, layers: Mapping[str, FileMatrix], shapes: Mapping[str, tuple[int, int]], max_rank: int
) -> AdapterWeights:
    """Return the adapter in a folder written by PEFT's save_pretrained(); see checked_weights().

    layers: those that adapters may change, by name.

    Errors: ModelFileError; UnsupportedModelError naming the unsupported setting or tensor.
    """
    if not folder.is_dir():
        raise ModelFileError(f"{folder}: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a .gguf file")
    config, path = PeftConfig(folder), folder / WEIGHTS_FILE
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        hint = "; adapter_model.bin is a pickle, which is never loaded: save the adapter again" if pickled else ""
        raise ModelFileError(f"{folder}: {WEIGHTS_FILE} is missing{hint}")
    pairs: dict[str, dict[str, Numbers]] = {}
    tensors, stems = read_safetensors(path), sorted({name.partition(".")[0] for name in layers})
    with map_file(path) as file:
        for name, tensor in tensors.items():
            matrix, part = _parts_of(name, path)
            ours = _name_in_model(matrix, layers, stems)
            if "lora_embedding" in name and ours not in layers:
                raise UnsupportedModelError(f"{path}: tensor {name!r:.120}: {_OF_TABLES}")
            found = pairs.setdefault(ours, {})
            if part in found:
                raise ModelFileError(f"{path}: {part} of {matrix!r:.120} occurs twice")
            found[part] = _numbers(file, tensor, name, path)
    matrices: dict[str, LowRank] = {}
    for matrix, pair in pairs.items():
        if len(pair) < 2:
            raise ModelFileError(f"{path}: {matrix!r:.120} has {', '.join(pair)} alone")
        if len(pair["lora_A"]) != (rank := config.rank(matrix)):
            raise ModelFileError(
                f"{path}: {matrix!r:.120} has rank {len(pair['lora_A'])}, but {CONFIG_FILE} says {rank}"
            )
        matrices[matrix] = LowRank(pair["lora_A"], pair["lora_B"], config.scale(matrix))
    lacking = set(config.targets) - _endings(matrices)
    if lacking and (lost := sorted(lacking & _endings(layers))):  # PEFT also writes targets that match no layer
        raise ModelFileError(f"{path}: {CONFIG_FILE} names the target {lost[0]!r:.80}, but has no tensor for it")
    return checked_weights(path, model_matrices(path, matrices, layers), shapes, max_rank)


def _endings(names: Iterable[str]) -> set[str]:
    """Return all names that PEFT's target_modules may use for these: each full name, and its ends after dots."""
    return {".".join(parts[begin:]) for name in names for parts in [name.split(".")] for begin in range(len(parts))}


def _parts_of(name: str, path: Path) -> tuple[str, str]:
    """Return the matrix that a tensor belongs to, and lora_A or lora_B. Errors: UnsupportedModelError."""
    match = _NAME.fullmatch(name)
    if match is None:
        kind = next((one for one in ("lora_magnitude_vector", "lora_bias") if one in name), "")
        reason = f"{kind} is not supported" if kind else "it is neither lora_A nor lora_B of a linear layer"
        raise UnsupportedModelError(f"{path}: tensor {name!r:.120}: {reason}")
    return match["matrix"], f"lora_{match['part'] or match['table']}"


def _name_in_model(matrix: str, layers: Mapping[str, FileMatrix], stems: Sequence[str]) -> str:
    """Return the model's name for the matrix. stems: first parts of the layers' names.

    Adapters of a model without a head omit that part ("model.").
    """
    return next((name for name in (matrix, *(f"{stem}.{matrix}" for stem in stems)) if name in layers), matrix)


def _numbers(file: mmap.mmap, tensor: SafetensorsTensor, name: str, path: Path) -> Numbers:
    """Return a copy of a matrix, because the file may change while requests use the adapter."""
    if (dtype := _DTYPES.get(tensor.dtype)) is None:
        known = ", ".join(_DTYPES)
        raise UnsupportedModelError(f"{path}: tensor {name!r:.120} is {tensor.dtype}; supported are {known}")
    if len(tensor.shape) != 2:
        raise ModelFileError(f"{path}: tensor {name!r:.120} has shape {list(tensor.shape)}; expected a matrix")
    data = np.frombuffer(bytearray(file[tensor.begin : tensor.end]), np.uint8)
    return data.view(dtype).reshape(tensor.shape)


# PeftConfig: a PEFT folder's adapter_config.json, checked. Unsupported settings are refused by name.


CONFIG_FILE = "adapter_config.json"
#: Settings that do not affect what is computed from the tensors.
_SILENT = {
    *("alpha_pattern", "arrow_config", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha"),
    *("lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern"),
    *("revision", "runtime_config", "target_modules", "task_type", "use_rslora", "monteclora_config"),
}
#: Settings that must be empty, false or "none", and why.
_REFUSED = {
    "use_dora": "DoRA scales the sum of both products by the size of the merged weight",
    "lora_bias": "adapters with biases are not supported",
    "bias": "the base model's biases are shared by all requests",
    "modules_to_save": "whole modules of the base model are shared by all requests",
    "trainable_token_indices": "the base model's embeddings are shared by all requests",
    "layer_replication": "the adapter would need another number of layers",
    "alora_invocation_tokens": "an activated LoRA begins in the middle of a prompt",
    "use_qalora": "QALoRA pools the input before the product",
    "fan_in_fan_out": "matrices must be [out, in]",
    "megatron_config": "Megatron's parallel layers are not PEFT's linear ones",
    "target_parameters": "only linear layers can be adapted",
    "loftq_config": "LoftQ changes the base model",
    "corda_config": "CorDA changes the base model",
    "lora_ga_config": "LoRA-GA changes the base model",
}
#: Prefixes of init_lora_weights values that change the base model.
_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")

_Value = TypeVar("_Value", int, float)


class PeftConfig:
    """The settings of a PEFT adapter that its arithmetic needs.

    Errors: ModelFileError for an invalid setting, UnsupportedModelError for an unsupported one.
    """

    def __init__(self, folder: Path) -> None:
        self._source = folder / CONFIG_FILE
        try:
            settings = json.loads(read_small_file(self._source))
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{self._source}: not JSON: {error}") from None
        if not isinstance(settings, dict):
            raise ModelFileError(f"{self._source}: expected an object, got {type(settings).__name__}")
        self._check(settings)
        self._rank, self._alpha = self._whole("r", settings.get("r")), self._number(settings, "lora_alpha")
        self._ranks: NamePatterns[int] = self._pattern(settings, "rank_pattern", self._whole)
        self._alphas: NamePatterns[float] = self._pattern(
            settings, "alpha_pattern", lambda name, value: self._number({name: value}, name)
        )
        self._is_rank_stabilized = settings.get("use_rslora") is True
        targets = settings.get("target_modules")
        #: Names that must each have matrices if the model has layers of that name. Empty if the setting is "all-linear"
        #: or a regular expression, or if some modules are excluded.
        self.targets: list[str] = []
        is_list = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
        if isinstance(targets, list) and is_list and not settings.get("exclude_modules"):
            self.targets = targets

    def rank(self, name: str) -> int:
        """Return the rank of the matrix of this name."""
        return self._ranks.first(name, self._rank)

    def scale(self, name: str) -> float:
        """Return the factor of b @ a of the matrix of this name (rsLoRA: Kalajdzievski 2023, arXiv 2312.03732)."""
        alpha, rank = self._alphas.first(name, self._alpha), self.rank(name)
        return alpha / math.sqrt(rank) if self._is_rank_stabilized else alpha / rank

    def _check(self, settings: Mapping[str, Any]) -> None:
        if (kind := settings.get("peft_type")) != "LORA":
            raise UnsupportedModelError(f"{self._source}: peft_type is {kind!r:.80}; only LORA is supported")
        init = settings.get("init_lora_weights")
        if isinstance(init, str) and init.lower().startswith(_CHANGING_INITS):
            raise UnsupportedModelError(
                f"{self._source}: init_lora_weights is {init!r:.80}, which changes the base model: convert the adapter "
                "to LoRA with PEFT (save_pretrained with path_initial_model_for_weight_conversion)"
            )
        for name, value in settings.items():
            if name in _SILENT or not value or value == "none":
                continue
            if name in _REFUSED:
                raise UnsupportedModelError(f"{self._source}: {name} is {value!r:.80}: {_REFUSED[name]}")
            raise UnsupportedModelError(f"{self._source}: {name} is {value!r:.80}, which this version does not support")

    def _whole(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**16:
            raise ModelFileError(f"{self._source}: {name} must be a whole number above 0; got {value!r:.80}")
        return value

    def _number(self, settings: Mapping[str, Any], name: str) -> float:
        value = settings.get(name)
        # False for NaN too.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MAX_SCALE:
            raise ModelFileError(f"{self._source}: {name} must be a number; got {value!r:.80}")
        return float(value)

    def _pattern(
        self, settings: Mapping[str, Any], name: str, read: Callable[[str, object], _Value]
    ) -> NamePatterns[_Value]:
        """Return a setting by name or regular expression. The first one that matches a matrix counts, as in PEFT."""
        given = settings.get(name) or {}
        if not isinstance(given, dict):
            raise ModelFileError(f"{self._source}: {name} must be an object; got {given!r:.80}")
        values = {key: read(name, value) for key, value in given.items()}
        return NamePatterns(values, f"{self._source}: {name}")
