"""A model's rotary embeddings: frequencies from the thetas and the scaling of its config."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from core.models.config import ModelConfig
from core.models.layer_kinds import windows
from core.models.rope_scaling import FrequencyDivisors, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from ipc.arrays import Floats
from kernels import rotary

_Kind = TypeVar("_Kind")
_Made = TypeVar("_Made")


class Rotary(NamedTuple):
    """One rotary embedding: the arguments of kernels.rotary.rotary_tables."""

    frequencies: Floats  # [head_dim / 2] float32, radians per token
    factor: float  # multiplies cosine and sine


def rotary_embeddings(config: ModelConfig) -> tuple[Rotary, ...]:
    """Return the embedding of each kind of layer (layer_kinds.py); the same object where kinds share one."""
    full = sliding = _rotary(config.head_dim, config.rope_theta, config.rope_scaling)
    if config.sliding_rope_theta is not None:
        sliding = _rotary(config.head_dim, config.sliding_rope_theta, None)
    return tuple(full if window is None else sliding for window in windows(config))


def of_each_kind(make: Callable[[_Kind], _Made], rotaries: Sequence[_Kind]) -> tuple[_Made, ...]:
    """Return make(embedding) for each kind of layer; it is called once where kinds share an embedding."""
    first = make(rotaries[0])
    return (first, *(first if other is rotaries[0] else make(other) for other in rotaries[1:]))


def _rotary(head_dim: int, theta: float, scaling: RopeScaling | None) -> Rotary:
    frequencies = rotary.rotary_frequencies(head_dim, theta)
    match scaling:
        case None:
            return Rotary(frequencies, 1.0)
        case LinearScaling(factor):
            return Rotary(rotary.linear(frequencies, factor), 1.0)
        case Llama3Scaling(factor, low, high, original):
            return Rotary(rotary.llama3(frequencies, factor, low, high, original), 1.0)
        case YarnScaling() as yarn:
            stretched = rotary.yarn(
                head_dim,
                theta,
                yarn.factor,
                yarn.original_max_position_embeddings,
                yarn.beta_fast,
                yarn.beta_slow,
                yarn.truncate,
            )
            return Rotary(stretched, yarn.attention_factor)
        case FrequencyDivisors(divisors):
            divided: Floats = np.divide(frequencies, np.array(divisors, np.float32))
            return Rotary(divided, 1.0)
