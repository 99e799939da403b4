"""Rotary frequencies stretched for longer contexts: frequencies [D / 2] float32, in radians per token -> as many.

The operations and their order are those of the published models' own code. An angle is a frequency times a position, so
a frequency's last bit counts.
"""

import math

import torch


def linear(frequencies: torch.Tensor, factor: float) -> torch.Tensor:
    """Divide all frequencies by the factor."""
    return frequencies / factor


def llama3(
    frequencies: torch.Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original_length: float
) -> torch.Tensor:
    """Stretch long wavelengths and keep short ones.

    Those above original_length / low_freq_factor are stretched. Those below original_length / high_freq_factor are
    kept. Wavelengths between the two get a weighted mean.
    """
    wavelengths = 2 * math.pi / frequencies
    low, high = original_length / low_freq_factor, original_length / high_freq_factor
    smooth = (original_length / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    return torch.where(wavelengths > low, frequencies / factor, torch.where(wavelengths < high, frequencies, between))


def yarn(
    head_dim: int,
    theta: float,
    factor: float,
    original_length: float,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> torch.Tensor:
    """Return the frequencies [head_dim / 2] of YaRN, computed from theta.

    Dimensions that turn more than beta_fast times within original_length are kept. Those that turn less than beta_slow
    times are stretched. Between the two, the passage is linear.
    """

    def dimension(rotations: float) -> float:
        return (head_dim * math.log(original_length / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width, 0, 1)
    wavelengths = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    kept, stretched = 1.0 / wavelengths, 1.0 / (factor * wavelengths)
    share = 1 - ramp
    return stretched * (1 - share) + kept * share
