"""A model's rotary embeddings: frequencies from the thetas and the scaling in its config."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from core.models.config import ModelConfig
from core.models.layers.layer_kinds import LayerKind, kinds
from core.models.layers.rope_scaling import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
)
from ipc.tables.arrays import Floats, Ints
from kernels import rotary

_Kind = TypeVar("_Kind")
_Made = TypeVar("_Made")


class Rotary(NamedTuple):
    """One rotary embedding: the arguments of kernels.rotary.rotary_tables."""

    frequencies: Floats  # [head_dim / 2] float32, radians per token; 0 = a pair that is not rotated
    factor: float  # multiplies cosine and sine of rotated pairs
    growth: tuple[float, float] | None = None  # for queries: the arguments of kernels.rotary.query_factors


def rotary_embeddings(config: ModelConfig, length: int | None = None) -> tuple[Rotary, ...]:
    """Return the embedding for each kind of layer (layer_kinds.py). Kinds with equal embeddings get the same object.

    length: of the longest context, in tokens; None = max_position_embeddings.
    """
    length = length or config.max_position_embeddings
    made: dict[tuple[bool, bool, int], Rotary] = {}

    def of(kind: LayerKind) -> Rotary:
        width = kind.heads.head_dim if config.latent is None else config.latent.rotated_dim
        is_own = kind.window is not None and config.sliding_rope_theta is not None
        key = kind.is_rotated, kind.is_rotated and is_own, width
        if key not in made:
            theta, scaling = config.rope_theta, config.rope_scaling
            if is_own and config.sliding_rope_theta is not None:
                theta, scaling = config.sliding_rope_theta, None
            none = Rotary(np.zeros(width // 2, np.float32), 1.0)
            made[key] = _rotary(config, width, theta, scaling, length) if kind.is_rotated else none
        return made[key]

    return tuple(of(kind) for kind in kinds(config))


def axes_of_pairs(config: ModelConfig) -> Ints | None:
    """Return config.rope_axes for all pairs of a head; those that are not rotated have any."""
    if config.rope_axes is None:
        return None
    axes = np.array(config.rope_axes, np.int64)
    return np.pad(axes, (0, config.head_dim // 2 - len(axes)))


def of_each_kind(make: Callable[[_Kind], _Made], rotaries: Sequence[_Kind]) -> tuple[_Made, ...]:
    """Return make(embedding) for each kind of layer. It is called once per distinct embedding."""
    made = {id(each): make(each) for each in {id(each): each for each in rotaries}.values()}
    return tuple(made[id(each)] for each in rotaries)


def _rotary(config: ModelConfig, width: int, theta: float, scaling: RopeScaling | None, length: int) -> Rotary:
    """Return the embedding of heads of this width; dimensions that are not rotated have the frequency 0."""
    frequencies, factor, _ = _scaled(config.rotary_dim or width, theta, scaling, length)
    growth = None
    if config.query_growth is not None and isinstance(scaling, YarnScaling):
        growth = config.query_growth, scaling.original_max_position_embeddings
    return Rotary(np.pad(frequencies, (0, width // 2 - len(frequencies))), factor, growth)


def _scaled(width: int, theta: float, scaling: RopeScaling | None, length: int) -> Rotary:
    """Return the embedding of `width` numbers of a head."""
    frequencies = rotary.rotary_frequencies(width, theta)
    match scaling:
        case None:
            return Rotary(frequencies, 1.0)
        case LinearScaling(factor):
            return Rotary(rotary.linear(frequencies, factor), 1.0)
        case Llama3Scaling(factor, low, high, original):
            return Rotary(rotary.llama3(frequencies, factor, low, high, original), 1.0)
        case YarnScaling() as yarn:
            stretched = rotary.yarn(
                width,
                theta,
                yarn.factor,
                yarn.original_max_position_embeddings,
                yarn.beta_fast,
                yarn.beta_slow,
                yarn.truncate,
            )
            return Rotary(stretched, yarn.attention_factor)
        case LongropeScaling(short, long):
            divisors = long if scaling.is_long(length) else short
            return Rotary(rotary.longrope(width, theta, divisors), scaling.attention_factor)
        case ProportionalScaling(factor, num_pairs):
            slowed = rotary.linear(frequencies, factor)
            slowed[num_pairs:] = 0
            return Rotary(slowed, 1.0)
        case FrequencyDivisors(divisors):
            divided: Floats = np.divide(frequencies, np.array(divisors, np.float32))
            return Rotary(divided, 1.0)
