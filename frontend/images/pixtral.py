"""PixtralImages: images by the rules of Pixtral and Mistral 3: each keeps about its size; a mark ends each of its rows.

Images larger than a longest side are made smaller, and both sides become multiples of a unit, as in transformers'
processor. They are resized by Pillow's bicubic filter, on 8 bits a colour, as in transformers' Pillow backend.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from frontend.images.rules import PROCESSOR_FILE, Squares, check_settings
from ipc.errors import ModelFileError
from ipc.wire.feature_messages import FeatureLimits

if TYPE_CHECKING:
    from PIL.Image import Image

_MARK, _BREAK, _END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
_ONLY = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
}  # 3 = bicubic


class PixtralImages(NamedTuple):
    """The ImageRules of Pixtral's encoder."""

    unit: int  # pixels; a square of this side becomes one row
    longest: int  # pixels, of an image's longer side
    mark_id: int

    @property
    def mark(self) -> str:
        """Return the text for an image in prompts, and for each of its tokens but those that end a row."""
        return _MARK

    @property
    def token(self) -> str:
        """Return the text of the token for a row of an image."""
        return _MARK

    def rows_of(self, shape: Sequence[int]) -> int:
        """Return the number of tokens for an image of this shape, those that end its rows included."""
        return (shape[0] // self.unit) * (shape[1] // self.unit + 1) - 1

    def squares_of(self, image: "Image") -> Squares:
        """Return an image in RGB as one rectangle."""
        from PIL.Image import Resampling

        height, width = self.size_of(image.height, image.width)
        resized = image if image.size == (width, height) else image.resize((width, height), Resampling.BICUBIC)
        return Squares([np.asarray(resized, np.uint8)], height // self.unit, width // self.unit)

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the rectangle that an image becomes."""
        ratio, unit = max(height / self.longest, width / self.longest), self.unit
        if ratio > 1:
            height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
        return ((height - 1) // unit + 1) * unit, ((width - 1) // unit + 1) * unit

    def text_of(self, num_rows: int, num_columns: int) -> str:
        """Return the text for an image in the prompt."""
        return _BREAK.join([_MARK * num_columns] * num_rows) + _END


def pixtral_images(
    settings: Mapping[str, Any], limits: FeatureLimits, token_id: Callable[[str], int | None]
) -> PixtralImages:
    """Return the rules of a model with these settings. Errors: ModelFileError, UnsupportedModelError."""
    check_settings(settings, _ONLY)
    unit, size = limits.image_size, settings.get("size") or {"longest_edge": 1024}
    longest = size.get("longest_edge") if isinstance(size, Mapping) else None
    if type(longest) is not int or longest < 1:
        raise ModelFileError(
            f"{PROCESSOR_FILE}: size must have the longest side of an image as longest_edge, got {size!r:.80}"
        )
    ids = {token: token_id(token) for token in (_MARK, _BREAK, _END)}
    for token, number in ids.items():
        if number is None:
            raise ModelFileError(f"tokenizer.json has no token {token}")
    mark_id = ids[_MARK]
    assert mark_id is not None, ids
    side = (math.isqrt(4 * limits.image_rows + 5) - 1) // 2  # the largest with side * (side + 1) - 1 rows at most
    return PixtralImages(unit, min(longest, max(1, side) * unit), mark_id)
