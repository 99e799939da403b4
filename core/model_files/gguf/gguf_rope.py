"""The rotary scaling of a GGUF file: from its metadata, or from a tensor of one divisor for each frequency."""

import math
import mmap
from pathlib import Path

import numpy as np

from core.model_files.settings.rope_scaling import yarn_attention_factor
from core.model_files.settings.values import Values
from core.models.architectures.by_name import Architecture
from core.models.layers.rope_scaling import FrequencyDivisors, LinearScaling, LongropeScaling, RopeScaling, YarnScaling
from ipc.errors import UnsupportedModelError
from ipc.files.gguf import GgufHeader
from ipc.files.mapped_file import map_file

_DIVISORS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"


def gguf_rope_scaling(
    values: Values, header: GgufHeader, path: Path, architecture: Architecture, max_positions: int, width: int
) -> RopeScaling | None:
    """Return the scaling; None without one. width: numbers of a head that are rotated. max_positions: tokens.

    Errors: ModelFileError naming the key or tensor; UnsupportedModelError.
    """
    if architecture.longrope and (_SHORT in header.tensors or _LONG in header.tensors):
        return _longrope(values, header, path, max_positions, width // 2)
    if values.get("attention_factor") not in (None, 1.0):
        values.refuse("attention_factor", "only 1.0 is")
    if _DIVISORS in header.tensors:
        if values.get("rope_type") not in (None, "none"):
            values.refuse("rope_type", f"beside the tensor {_DIVISORS} only 'none' is")
        return FrequencyDivisors(_divisors(values, header, path, _DIVISORS, width // 2))
    kind = values.values.get(values.key("rope_type"), "linear")  # llama.cpp's default
    if kind not in ("none", "linear", "yarn"):
        values.refuse("rope_type", "'none', 'linear' and 'yarn' are")
    if values.get("factor") in (None, 0, 1):
        return None
    factor = values.number("factor", 1e-6, 1e6)
    has_equal_scales = architecture.query_growth or architecture.latent
    if kind == "yarn":
        return YarnScaling(
            factor=factor,
            original_max_position_embeddings=values.number(_LENGTH, 1, 2**24, max_positions),
            # Ministral 3's mscale and mscale_all_dim are equal, and so are DeepSeek's: llama.cpp computes no other.
            attention_factor=1.0 if has_equal_scales else yarn_attention_factor(factor),
            beta_fast=values.number("beta_fast", 1e-6, 1e6, 32.0),
            beta_slow=values.number("beta_slow", 1e-6, 1e6, 1.0),
            truncate=architecture.gguf_yarn_truncates,
        )
    return LinearScaling(factor) if kind == "linear" else None


_LENGTH = "original_max_position_embeddings"


def _longrope(values: Values, header: GgufHeader, path: Path, max_positions: int, expected: int) -> LongropeScaling:
    if values.get("rope_type") not in (None, "none", "longrope"):
        values.refuse("rope_type", f"beside the tensor {_LONG} only 'none' and 'longrope' are")
    for name in (_SHORT, _LONG):
        if name not in header.tensors:
            values.fail(name, "is missing")
    return LongropeScaling(
        _divisors(values, header, path, _SHORT, expected),
        _divisors(values, header, path, _LONG, expected),
        values.number(_LENGTH, 1, 2**24, max_positions),
        values.number("attention_factor", 1e-6, 1e6, 1.0),
    )


def _divisors(values: Values, header: GgufHeader, path: Path, name: str, expected: int) -> tuple[float, ...]:
    """Read a tensor of frequency divisors.

    It belongs to the configuration, and has only a few numbers. Errors: ModelFileError, UnsupportedModelError.
    """
    tensor = header.tensors[name]
    if tensor.type != "F32" or tensor.shape != (expected,):
        raise UnsupportedModelError(
            f"{path}: tensor {name} of type {tensor.type} and shape {tensor.shape} is not supported; "
            f"F32 of shape ({expected},) is"
        )
    with map_file(path, mmap.ACCESS_READ) as data:
        numbers = np.frombuffer(data[tensor.offset : tensor.offset + tensor.num_bytes], "<f4").tolist()
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        values.fail(name, "must hold finite numbers above 0")
    return tuple(numbers)
