"""Rotary scalings: the ways in which models extend their rotary embedding to longer contexts."""

import msgspec


class LinearScaling(msgspec.Struct, frozen=True):
    """Linear scaling: all frequencies are divided by one factor (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True):
    """Llama 3.1's scaling: low frequencies are divided by the factor, high ones kept, with a smooth transition."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float  # tokens


class YarnScaling(msgspec.Struct, frozen=True):
    """YaRN (Peng et al. 2023, arXiv 2309.00071): interpolation by wavelength, with sharpened attention."""

    factor: float
    original_max_position_embeddings: float  # tokens
    attention_factor: float  # multiplies cosine and sine
    beta_fast: float = 32.0  # from this many rotations within the original length on a frequency is kept
    beta_slow: float = 1.0  # up to this many rotations a frequency is divided by the factor
    truncate: bool = True  # both ends of the transition are rounded to whole dimensions


class LongropeScaling(msgspec.Struct, frozen=True):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): searched divisors of the frequencies, for short and long contexts.

    Which ones a model takes is fixed when max_model_len is: the long ones if it is more than the original length.
    """

    short: tuple[float, ...]  # [rotary_dim / 2]
    long: tuple[float, ...]  # [rotary_dim / 2]
    original_max_position_embeddings: float  # tokens
    attention_factor: float  # multiplies cosine and sine

    def is_long(self, length: int) -> bool:
        """Whether contexts of up to so many tokens take the long divisors."""
        return length > self.original_max_position_embeddings


class FrequencyDivisors(msgspec.Struct, frozen=True):
    """One divisor for each frequency: GGUF's tensor rope_freqs.weight, which holds Llama 3's computed scaling."""

    divisors: tuple[float, ...]  # [rotary_dim / 2]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongropeScaling | FrequencyDivisors
