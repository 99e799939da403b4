"""Rotary scalings: how a model stretches its rotary embedding to longer contexts."""

import msgspec


class LinearScaling(msgspec.Struct, frozen=True):
    """All frequencies divided by one factor (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True):
    """Llama 3.1: low frequencies divided by the factor, high ones kept, a smooth passage between them."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float  # tokens


class YarnScaling(msgspec.Struct, frozen=True):
    """YaRN (Peng et al. 2023, arXiv 2309.00071): interpolated by wavelength, and attention sharpened."""

    factor: float
    original_max_position_embeddings: float  # tokens
    attention_factor: float  # of cosine and sine
    beta_fast: float = 32.0  # rotations within the original length from which a frequency is kept
    beta_slow: float = 1.0  # and up to which it is divided by the factor
    truncate: bool = True  # whole dimensions at both ends of the passage


class FrequencyDivisors(msgspec.Struct, frozen=True):
    """Each frequency divided by a number of its own: GGUF's tensor rope_freqs.weight, Llama 3's scaling worked out."""

    divisors: tuple[float, ...]  # [head_dim / 2]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyDivisors
