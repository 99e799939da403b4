"""The quantization of a safetensors folder, read from its config.json: which tensors a matrix is stored as."""

import json
from typing import Any

from core.model_files.settings.values import Values
from core.models.config import Packing

#: Formats of compressed-tensors in which a weight is a code and a scale.
_FORMATS = ("dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


def read_packing(values: Values) -> Packing:
    """Return how a model's matrices are packed; "none" without a quantization_config.

    Only what changes the numbers of the weights counts. Scales of activations and of the KV cache are left aside: the
    engine computes with activations and caches as they are. Errors: ModelFileError for a value of the wrong type;
    UnsupportedModelError naming the setting that cannot be read.
    """
    config = values.group("quantization_config")
    if config is None:
        return "none"
    method = _one_of(config, "quant_method", "gptq", "awq", "auto-round", "compressed-tensors", "fp8", "mxfp4")
    if method == "gptq":
        return _gptq(config)
    if method == "auto-round":
        return _auto_round(config)
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method == "awq":
        _one_of(config, "version", None, "gemm", "GEMM")
        return "awq"
    if method == "mxfp4":
        return "mxfp4"
    _one_of(config, "fmt", None, "e4m3")
    return "fp8"


def _gptq(config: Values) -> Packing:
    """GPTQ stores each zero less one, unless checkpoint_format says gptq_v2 (GPTQModel)."""
    _one_of(config, "is_marlin_format", None, False)
    return "gptq_v2" if _one_of(config, "checkpoint_format", None, "gptq", "gptq_v2") == "gptq_v2" else "gptq"


def _auto_round(config: Values) -> Packing:
    """AutoRound packs as GPTQ or AWQ do; without either name it is GPTQ with zeros as they are."""
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
