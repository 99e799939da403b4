"""Rotary scalings: how models extend their rotary embedding to longer contexts."""

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
    beta_fast: float = 32.0  # frequencies with at least this many rotations in the original length are kept
    beta_slow: float = 1.0  # frequencies with at most this many rotations are divided by the factor
    truncate: bool = True  # both ends of the transition are rounded to whole dimensions


class LongropeScaling(msgspec.Struct, frozen=True):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): searched divisors of frequencies, for short and long contexts.

    The choice is made with max_model_len: the long ones if it is more than the original length.
    """

    short: tuple[float, ...]  # [rotary_dim / 2]
    long: tuple[float, ...]  # [rotary_dim / 2]
    original_max_position_embeddings: float  # tokens
    attention_factor: float  # multiplies cosine and sine

    def is_long(self, length: int) -> bool:
        """Return whether contexts of up to this length use the long divisors."""
        return length > self.original_max_position_embeddings


class ProportionalScaling(msgspec.Struct, frozen=True):
    """Gemma 4's rotation: the frequencies of the whole head, of which only the first pairs are rotated."""

    factor: float  # divides the frequencies
    num_pairs: int  # that are rotated


class FrequencyDivisors(msgspec.Struct, frozen=True):
    """One divisor per frequency: GGUF's tensor rope_freqs.weight, which holds Llama 3's computed scaling."""

    divisors: tuple[float, ...]  # [rotary_dim / 2]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongropeScaling | ProportionalScaling | FrequencyDivisors
