"""InternVLImages: images by the rules of InternVL: divided into squares, followed by the whole image.

The number of squares is that of the arrangement whose shape is nearest to the image's. Images are resized by Pillow's
bicubic filter, on 8 bits a colour, as in transformers' Pillow backend.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from frontend.images.rules import (
    BICUBIC,
    PROCESSOR_FILE,
    SquareRules,
    Squares,
    check_settings,
    check_side,
    cut,
    find_token,
    nearest_grid,
)
from ipc.errors import ModelFileError
from ipc.wire.feature_messages import FeatureLimits

if TYPE_CHECKING:
    from PIL.Image import Image

_MARK, _BEGIN, _END = "<IMG_CONTEXT>", "<img>", "</img>"
_MOST = 64  # squares of an image that a file may ask for


@dataclass(frozen=True, kw_only=True)
class InternVLImages(SquareRules):
    """The ImageRules of InternVL."""

    mark: ClassVar[str] = _MARK
    token: ClassVar[str] = _MARK
    resample: ClassVar[int] = BICUBIC
    least: int  # squares of an image, the whole one not counted
    most: int

    def squares_of(self, image: "Image") -> Squares:
        """Return the squares of an image in RGB."""
        columns, rows = self.grid_of(image.width, image.height)
        whole = self.resized(image, columns * self.square, rows * self.square)
        pixels = cut(np.asarray(whole, np.uint8), self.square)
        return Squares([*pixels, self.whole(image)] if len(pixels) > 1 else pixels, rows, columns)

    def grid_of(self, width: int, height: int) -> tuple[int, int]:
        """Return (columns, rows) of the squares that an image is divided into."""
        return nearest_grid((width, height), self.square, _grids(self.least, self.most))

    def text_of(self, num_rows: int, num_columns: int, last: Sequence[int]) -> str:
        """Return the text for an image with these squares in the prompt."""
        count = num_rows * num_columns
        return _BEGIN + _MARK * (self.rows_per_square * (count + 1 if count > 1 else 1)) + _END


@lru_cache(maxsize=4)
def _grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return (columns, rows) of all arrangements, by their number of squares."""
    every = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most + 1)]
    return tuple(sorted((one for one in every if least <= one[0] * one[1] <= most), key=math.prod))


def internvl_images(
    settings: Mapping[str, Any], limits: FeatureLimits, token_id: Callable[[str], int | None]
) -> InternVLImages:
    """Return the rules of a model with these settings. Errors: ModelFileError, UnsupportedModelError.

    transformers' processor of InternVL divides images, whatever the file says of crop_to_patches.
    """
    check_settings(settings, BICUBIC)
    check_side(settings, 384, limits.image_size)
    least, most = (settings.get(name) or other for name, other in (("min_patches", 1), ("max_patches", 12)))
    if type(least) is not int or type(most) is not int or not 1 <= least <= most <= _MOST:
        raise ModelFileError(
            f"{PROCESSOR_FILE}: min_patches and max_patches must be 1 to {_MOST}, in order; got {least!r:.40} and "
            f"{most!r:.40}"
        )
    mark_id = find_token(token_id, _MARK, _BEGIN, _END)
    square, rows = limits.image_size, limits.image_rows
    return InternVLImages(square=square, least=least, most=most, rows_per_square=rows, mark_id=mark_id)
