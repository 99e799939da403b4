"""Gemma4Images: images by Gemma 4's rules: each keeps about its shape, and becomes as large as its most tokens allow.

The sizes are those of transformers' processor, in floats, step by step. Images are resized by Pillow's bicubic filter,
on 8 bits a colour, as in transformers' Pillow backend.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from frontend.images.rules import PROCESSOR_FILE, Squares, check_settings
from ipc.errors import InvalidRequestError, ModelFileError
from ipc.wire.feature_messages import FeatureLimits

if TYPE_CHECKING:
    from PIL.Image import Image

_BEGIN, _MARK, _END = "<|image>", "<|image|>", "<image|>"
_ONLY = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": False,
    "do_convert_rgb": True,
    "resample": 3,
}  # 3 = bicubic


class Gemma4Images(NamedTuple):
    """The ImageRules of Gemma 4."""

    unit: int  # pixels; a square of this side becomes one row
    pool: int  # patches on a side of such a square
    most: int  # rows of an image
    mark_id: int

    @property
    def mark(self) -> str:
        """Return the text for an image in prompts, and for each of its tokens."""
        return _MARK

    @property
    def token(self) -> str:
        """Return the text of the token for a row of an image."""
        return _MARK

    def rows_of(self, shape: Sequence[int]) -> int:
        """Return the number of tokens for an image of this shape."""
        return (shape[0] // self.unit) * (shape[1] // self.unit)

    def squares_of(self, image: "Image") -> Squares:
        """Return an image in RGB as one rectangle. Errors: InvalidRequestError for one that is too long."""
        from PIL.Image import Resampling

        height, width = self.size_of(image.height, image.width)
        resized = image if image.size == (width, height) else image.resize((width, height), Resampling.BICUBIC)
        return Squares([np.asarray(resized, np.uint8)], height // self.unit, width // self.unit)

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the rectangle that an image becomes. Errors: InvalidRequestError."""
        unit = self.unit
        pixels = self.most * self.pool**2 * (unit // self.pool) ** 2
        factor = math.sqrt(pixels / (height * width))
        rows, columns = (math.floor(factor * side / unit) for side in (height, width))
        if not rows:
            rows, columns = 1, min(width // height, self.most)
        elif not columns:
            rows, columns = min(height // width, self.most), 1
        if rows * columns > self.most:
            raise InvalidRequestError(
                f"an image of {width} x {height} pixels is too long for this model: it would have {rows} x {columns} "
                f"squares of {unit} pixels, and at most {self.most} are allowed"
            )
        return rows * unit, columns * unit

    def text_of(self, num_rows: int, num_columns: int) -> str:
        """Return the text for an image in the prompt."""
        return f"{_BEGIN}{_MARK * (num_rows * num_columns)}{_END}"


def gemma4_images(
    settings: Mapping[str, Any], limits: FeatureLimits, token_id: Callable[[str], int | None]
) -> Gemma4Images:
    """Return the rules of a model with these settings. Errors: ModelFileError, UnsupportedModelError."""
    check_settings(settings, _ONLY)
    own = settings.get("patch_size", 16), settings.get("pooling_kernel_size", 3)
    if any(type(one) is not int or one < 1 for one in own) or own[0] * own[1] != limits.image_size:
        raise ModelFileError(
            f"{PROCESSOR_FILE}: patch_size and pooling_kernel_size are {own[0]!r:.80} and {own[1]!r:.80}, but the "
            f"vision encoder makes one row of {limits.image_size} x {limits.image_size} pixels"
        )
    ids = {token: token_id(token) for token in (_BEGIN, _MARK, _END)}
    for token, number in ids.items():
        if number is None:
            raise ModelFileError(f"tokenizer.json has no token {token}")
    mark_id = ids[_MARK]
    assert mark_id is not None, ids
    return Gemma4Images(limits.image_size, own[1], limits.image_rows, mark_id)
