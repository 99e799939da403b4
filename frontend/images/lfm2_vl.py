"""Lfm2VLImages: images by the rules of LFM2-VL: a large one is divided into squares, followed by the whole image.

A small one keeps about its size and shape. Images are resized by the bilinear filter in integers, as in transformers'
processor, which has a backend of torchvision only (frontend/images/fixed_point.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from frontend.images.fixed_point import resized
from frontend.images.rules import (
    BILINEAR,
    PROCESSOR_FILE,
    RectangleRules,
    Squares,
    check_settings,
    cut,
    find_token,
    nearest_grid,
    whole_units,
)
from ipc.errors import ModelFileError
from ipc.wire.feature_messages import FeatureLimits

if TYPE_CHECKING:
    from PIL.Image import Image

_MARK, _BEGIN, _END, _WHOLE = "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
_MOST = 64  # squares of an image that a file may ask for


@dataclass(frozen=True, kw_only=True)
class Lfm2VLImages(RectangleRules):
    """The ImageRules of LFM2-VL."""

    mark: ClassVar[str] = _MARK
    token: ClassVar[str] = _MARK
    resample: ClassVar[int] = BILINEAR
    side: int  # of the squares that a large image is divided into, pixels
    tiles: tuple[int, int]  # the fewest and the most squares; (1, 1): images are not divided
    tokens: tuple[int, int]  # of an image that is not divided, the fewest and the most
    tolerance: float  # an image is large if it has more than so many times the most tokens
    adds_whole: bool

    def squares_of(self, image: "Image") -> Squares:
        """Return the squares of an image in RGB and the whole image, or the whole image alone."""
        pixels = np.asarray(image, np.uint8)
        height, width = self.size_of(image.height, image.width)
        if not self._is_large(image.height, image.width):
            return Squares([resized(pixels, height, width)], 0, 0)
        columns, rows = nearest_grid(image.size, self.side, _arrangements(*self.tiles))
        squares = cut(resized(pixels, rows * self.side, columns * self.side), self.side)
        return Squares([*squares, resized(pixels, height, width)] if self.adds_whole else squares, rows, columns)

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the whole image's rectangle."""
        least, most = (count * self.unit**2 for count in self.tokens)
        return whole_units(height, width, self.unit, least, most)

    def _is_large(self, height: int, width: int) -> bool:
        half = self.unit // 2  # what a side of a thin image counts at least, as if no patches were merged
        sides = [max(half, round(side / self.unit) * self.unit) for side in (height, width)]
        return self.tiles != (1, 1) and sides[0] * sides[1] > self.tokens[1] * self.unit**2 * self.tolerance

    def text_of(self, num_rows: int, num_columns: int, last: Sequence[int]) -> str:
        """Return the text for an image with these squares in the prompt."""
        each = _MARK * (self.side // self.unit) ** 2
        text = "".join(
            f"<|img_row_{row + 1}_col_{column + 1}|>{each}" for row in range(num_rows) for column in range(num_columns)
        )
        if not text:
            text = _MARK * self.rows_of(last)
        elif self.adds_whole:
            text += _WHOLE + _MARK * self.rows_of(last)
        return _BEGIN + text + _END


@lru_cache(maxsize=4)
def _arrangements(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return (columns, rows) of all arrangements, by their number of squares; equal ones in transformers' order.

    Making those of 64 squares takes milliseconds.
    """
    every = [
        (columns, rows)
        for count in range(least, most + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if least <= columns * rows <= most
    ]
    return tuple(sorted(set(every), key=lambda one: one[0] * one[1]))


def lfm2_vl_images(
    settings: Mapping[str, Any], limits: FeatureLimits, token_id: Callable[[str], int | None]
) -> Lfm2VLImages:
    """Return the rules of a model with these settings. Errors: ModelFileError, UnsupportedModelError."""
    check_settings(settings, BILINEAR)
    unit = limits.image_size
    patch, factor = (
        _integer(settings, name, other) for name, other in (("encoder_patch_size", 16), ("downsample_factor", 2))
    )
    if patch * factor != unit or factor != 2 or not limits.any_size:
        raise ModelFileError(
            f"{PROCESSOR_FILE}: encoder_patch_size and downsample_factor are {patch} and {factor}, but the vision "
            f"encoder makes one row of {unit} x {unit} pixels, of 2 x 2 patches"
        )
    names = {"min_tiles": 2, "max_tiles": 10, "min_image_tokens": 64, "max_image_tokens": 256, "tile_size": 512}
    found = {name: _integer(settings, name, other) for name, other in names.items()}
    splits = settings.get("do_image_splitting") is not False
    tiles = (found["min_tiles"], found["max_tiles"]) if splits else (1, 1)
    if tiles != (1, 1) and not 2 <= tiles[0] <= tiles[1] <= _MOST:
        raise ModelFileError(f"{PROCESSOR_FILE}: min_tiles and max_tiles must be 2 to {_MOST}, in order; got {tiles}")
    tokens, side = (found["min_image_tokens"], found["max_image_tokens"]), found["tile_size"]
    if tokens[0] > tokens[1] or tokens[1] > limits.most_rows or side % unit or side > 1 << 12:
        raise ModelFileError(
            f"{PROCESSOR_FILE}: min_image_tokens and max_image_tokens must be in order, at most {limits.most_rows}, "
            f"and tile_size a multiple of {unit}, at most 4096; got {tokens} and {side}"
        )
    tolerance = settings.get("max_pixels_tolerance", 2.0)
    if type(tolerance) not in (int, float) or not 0 < tolerance < 1e6:
        raise ModelFileError(f"{PROCESSOR_FILE}: max_pixels_tolerance must be a positive number, got {tolerance!r:.80}")
    return Lfm2VLImages(
        unit=unit,
        side=side,
        tiles=tiles,
        tokens=tokens,
        tolerance=float(tolerance),
        adds_whole=settings.get("use_thumbnail") is not False,
        mark_id=find_token(token_id, _MARK, _BEGIN, _END),
    )


def _integer(settings: Mapping[str, Any], name: str, default: int) -> int:
    value = settings.get(name)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= 1 << 14:
        raise ModelFileError(f"{PROCESSOR_FILE}: {name} must be an integer from 1 to 16384, got {value!r:.80}")
    return value
