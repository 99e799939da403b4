"""InternVLImages: images by the rules of InternVL: divided into squares, followed by the whole image.

The number of squares is that of the arrangement whose shape is nearest to the image's. Images are resized by Pillow's
bicubic filter, on 8 bits a colour, as in transformers' Pillow backend.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from frontend.images.rules import PROCESSOR_FILE, Squares, check_settings
from ipc.errors import ModelFileError
from ipc.wire.feature_messages import FeatureLimits

if TYPE_CHECKING:
    from PIL.Image import Image

_MARK, _BEGIN, _END = "<IMG_CONTEXT>", "<img>", "</img>"
_ONLY = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
}  # 3 = bicubic
_MOST = 64  # squares of an image that a file may ask for


class InternVLImages(NamedTuple):
    """The ImageRules of InternVL."""

    square: int  # side of the squares that the vision encoder reads, pixels
    least: int  # squares of an image, the whole one not counted
    most: int
    rows_per_square: int
    mark_id: int

    @property
    def mark(self) -> str:
        """Return the text for an image in prompts, and for each token of a square."""
        return _MARK

    @property
    def token(self) -> str:
        """Return the text of the token for a row of a square."""
        return _MARK

    def rows_of(self, shape: Sequence[int]) -> int:
        """Return the number of tokens for a square."""
        return self.rows_per_square

    def squares_of(self, image: "Image") -> Squares:
        """Return the squares of an image in RGB."""
        from PIL.Image import Resampling

        side = self.square
        columns, rows = self.grid_of(image.width, image.height)
        numbers = np.asarray(image.resize((columns * side, rows * side), Resampling.BICUBIC), np.uint8)
        pixels = [
            np.ascontiguousarray(numbers[row * side : (row + 1) * side, column * side : (column + 1) * side])
            for row in range(rows)
            for column in range(columns)
        ]
        if len(pixels) > 1:
            pixels.append(np.asarray(image.resize((side, side), Resampling.BICUBIC), np.uint8))
        return Squares(pixels, rows, columns)

    def grid_of(self, width: int, height: int) -> tuple[int, int]:
        """Return (columns, rows) of the squares that an image is divided into.

        Of two arrangements whose shapes are equally near, the one with more squares is taken, if the image has more
        than half of its pixels.
        """
        every = [(c, r) for c in range(1, self.most + 1) for r in range(1, self.most + 1)]
        every = sorted(
            (one for one in every if self.least <= one[0] * one[1] <= self.most), key=lambda one: one[0] * one[1]
        )
        best, nearest = (1, 1), float("inf")
        for columns, rows in every:
            distance = abs(width / height - columns / rows)
            is_larger = width * height > 0.5 * self.square * self.square * columns * rows
            if distance < nearest or (distance == nearest and is_larger):
                best, nearest = (columns, rows), distance
        return best

    def text_of(self, num_rows: int, num_columns: int) -> str:
        """Return the text for an image with these squares in the prompt."""
        count = num_rows * num_columns
        return _BEGIN + _MARK * (self.rows_per_square * (count + 1 if count > 1 else 1)) + _END


def internvl_images(
    settings: Mapping[str, Any], limits: FeatureLimits, token_id: Callable[[str], int | None]
) -> InternVLImages:
    """Return the rules of a model with these settings. Errors: ModelFileError, UnsupportedModelError.

    transformers' processor of InternVL divides images, whatever the file says of crop_to_patches.
    """
    check_settings(settings, _ONLY)
    size, square = settings.get("size") or {"height": 384, "width": 384}, limits.image_size
    if not isinstance(size, Mapping) or (size.get("height"), size.get("width")) != (square, square):
        raise ModelFileError(
            f"{PROCESSOR_FILE}: size is {size!r:.80}, but the vision encoder reads squares of {square} x {square}"
        )
    least, most = (settings.get(name) or other for name, other in (("min_patches", 1), ("max_patches", 12)))
    if type(least) is not int or type(most) is not int or not 1 <= least <= most <= _MOST:
        raise ModelFileError(
            f"{PROCESSOR_FILE}: min_patches and max_patches must be 1 to {_MOST}, in order; got {least!r:.40} and "
            f"{most!r:.40}"
        )
    ids = {token: token_id(token) for token in (_MARK, _BEGIN, _END)}
    for token, number in ids.items():
        if number is None:
            raise ModelFileError(f"tokenizer.json has no token {token}")
    mark_id = ids[_MARK]
    assert mark_id is not None, ids
    return InternVLImages(square, least, most, limits.image_rows, mark_id)
