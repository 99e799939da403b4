"""Gemma4Images: images by Gemma 4's rules: each keeps about its shape, and becomes as large as its most tokens allow.

The sizes are those of transformers' processor, in floats, step by step. Images are resized by Pillow's bicubic filter,
on 8 bits a colour, as in transformers' Pillow backend.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from frontend.images.rules import BICUBIC, PROCESSOR_FILE, RectangleRules, check_settings, find_token
from ipc.errors import InvalidRequestError, ModelFileError
from ipc.wire.feature_messages import FeatureLimits

_BEGIN, _MARK, _END = "<|image>", "<|image|>", "<image|>"


@dataclass(frozen=True, kw_only=True)
class Gemma4Images(RectangleRules):
    """The ImageRules of Gemma 4."""

    mark: ClassVar[str] = _MARK
    token: ClassVar[str] = _MARK
    resample: ClassVar[int] = BICUBIC
    pool: int  # patches on a side of what becomes one row
    most: int  # rows of an image

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

    def text_of(self, num_rows: int, num_columns: int, last: Sequence[int]) -> str:
        """Return the text for an image in the prompt."""
        return f"{_BEGIN}{_MARK * (num_rows * num_columns)}{_END}"


def gemma4_images(
    settings: Mapping[str, Any], limits: FeatureLimits, token_id: Callable[[str], int | None]
) -> Gemma4Images:
    """Return the rules of a model with these settings. Errors: ModelFileError, UnsupportedModelError."""
    check_settings(settings, BICUBIC, do_normalize=False)
    own = settings.get("patch_size", 16), settings.get("pooling_kernel_size", 3)
    if any(type(one) is not int or one < 1 for one in own) or own[0] * own[1] != limits.image_size:
        raise ModelFileError(
            f"{PROCESSOR_FILE}: patch_size and pooling_kernel_size are {own[0]!r:.80} and {own[1]!r:.80}, but the "
            f"vision encoder makes one row of {limits.image_size} x {limits.image_size} pixels"
        )
    mark_id = find_token(token_id, _MARK, _BEGIN, _END)
    return Gemma4Images(unit=limits.image_size, pool=own[1], most=limits.image_rows, mark_id=mark_id)
