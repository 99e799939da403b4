"""A model's rotary embeddings: its config's thetas and scaling to frequencies."""

from typing import NamedTuple

import torch

from core.models.config import ModelConfig
from core.rope_scaling import FrequencyDivisors, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from kernels import rope_scaling
from kernels.rope import rotary_frequencies


class Rotary(NamedTuple):
    """One embedding, as kernels.rope.rotary_tables wants it."""

    frequencies: torch.Tensor  # [head_dim / 2] float32, radians per token
    factor: float  # of cosine and sine


def rotary_embeddings(config: ModelConfig) -> tuple[Rotary, ...]:
    """That of the layers that see everything; and that of the sliding ones, if theirs is another."""
    full = _rotary(config.head_dim, config.rope_theta, config.rope_scaling)
    if config.sliding_rope_theta is None:
        return (full,)
    return full, _rotary(config.head_dim, config.sliding_rope_theta, None)


def _rotary(head_dim: int, theta: float, scaling: RopeScaling | None) -> Rotary:
    frequencies = rotary_frequencies(head_dim, theta)
    match scaling:
        case None:
            return Rotary(frequencies, 1.0)
        case LinearScaling(factor):
            return Rotary(rope_scaling.linear(frequencies, factor), 1.0)
        case Llama3Scaling(factor, low, high, original):
            return Rotary(rope_scaling.llama3(frequencies, factor, low, high, original), 1.0)
        case YarnScaling() as yarn:
            stretched = rope_scaling.yarn(
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
            return Rotary(frequencies / torch.tensor(divisors), 1.0)
