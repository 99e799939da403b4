"""resized: an image resized by the bilinear filter in integers, with the bits of torch's CPU kernel.

Processors that transformers has for torchvision alone use that kernel (with AVX2). Its weights have 16 bits, where
Pillow's have 22, so one pixel in hundreds differs by one.
"""

import math
from collections.abc import Sequence

import numpy as np

from ipc.tables.arrays import Int32s, Ints, UInt8s

_MOST_BITS = 22  # of a weight's fraction
_MOST_WEIGHT = 1 << 15
_STRIP = 32  # rows of an image computed at once, which stay in the CPU's caches


def resized(pixels: UInt8s, height: int, width: int) -> UInt8s:
    """Return pixels [h, w, 3] as [height, width, 3]: rows first, then columns, each rounded to 8 bits."""
    if pixels.shape[1] != width:
        firsts, weights, bits = _taps(pixels.shape[1], width)
        places = np.minimum(firsts + np.arange(len(weights))[:, None], pixels.shape[1] - 1)
        strips = np.split(pixels, range(_STRIP, len(pixels), _STRIP))
        pixels = np.concatenate(
            [
                _rounded([strip[:, at] for at in places], [weight[:, None] for weight in weights], bits)
                for strip in strips
            ]
        )
    if len(pixels) != height:
        firsts, weights, bits = _taps(len(pixels), height)
        places = np.minimum(firsts + np.arange(len(weights))[:, None], len(pixels) - 1)
        parts = [slice(top, top + _STRIP) for top in range(0, height, _STRIP)]
        pixels = np.concatenate(
            [
                _rounded([pixels[at[part]] for at in places], [weight[part, None, None] for weight in weights], bits)
                for part in parts
            ]
        )
    return pixels


def _rounded(values: Sequence[UInt8s], weights: Sequence[Int32s], bits: int) -> UInt8s:
    """Return the sum of values times weights, which have so many bits of a fraction."""
    total = np.full(values[0].shape, 1 << (bits - 1), np.int32)
    for value, weight in zip(values, weights, strict=True):
        total += value * weight
    result: UInt8s = np.clip(total >> bits, 0, 255).astype(np.uint8)
    return result


def _taps(old: int, new: int) -> tuple[Ints, Int32s, int]:
    """Return for each of `new` pixels the first old one that it reads, the weights [most, new] of it and the next ones,
    and how many bits the weights' fractions have.
    """
    scale = old / new
    support = max(scale, 1.0)
    centres = scale * (np.arange(new) + 0.5)
    firsts = np.maximum((centres - support + 0.5).astype(np.int64), 0)
    ends = np.minimum((centres + support + 0.5).astype(np.int64), old)
    most = math.ceil(support) * 2 + 1
    places = firsts[:, None] + np.arange(most)
    far = np.abs((places - centres[:, None] + 0.5) * (1 / scale if scale >= 1 else 1.0))
    weights = np.where((far < 1) & (places < ends[:, None]), 1 - far, 0.0)
    total = np.zeros(new)
    for tap in range(most):  # in order
        total += weights[:, tap]
    weights /= total[:, None]
    largest, bits = float(weights.max()), 0
    while bits < _MOST_BITS and int(0.5 + largest * (1 << (bits + 1))) < _MOST_WEIGHT:
        bits += 1
    return firsts, (0.5 + weights.T * (1 << bits)).astype(np.int32), bits
