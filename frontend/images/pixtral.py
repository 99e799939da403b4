"""PixtralImages: images by the rules of Pixtral and Mistral 3: each keeps about its size; a mark ends each of its rows.

Images larger than a longest side are made smaller, and both sides become multiples of a unit, as in transformers'
processor. They are resized by Pillow's bicubic filter, on 8 bits a colour, as in transformers' Pillow backend.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from frontend.images.rules import BICUBIC, PROCESSOR_FILE, RectangleRules, check_settings, find_token
from ipc.errors import ModelFileError
from ipc.wire.feature_messages import FeatureLimits

_MARK, _BREAK, _END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True, kw_only=True)
class PixtralImages(RectangleRules):
    """The ImageRules of Pixtral's encoder. Tokens that end a row of an image have a text of their own."""

    mark: ClassVar[str] = _MARK
    token: ClassVar[str] = _MARK
    resample: ClassVar[int] = BICUBIC
    longest: int  # pixels, of an image's longer side

    def rows_of(self, shape: Sequence[int]) -> int:
        """Return the number of tokens for an image of this shape, those that end its rows included."""
        return (shape[0] // self.unit) * (shape[1] // self.unit + 1) - 1

    def marks_of(self, shape: Sequence[int]) -> int:
        """Return the number of tokens for an image of this shape, without those that end its rows."""
        return (shape[0] // self.unit) * (shape[1] // self.unit)

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the rectangle that an image becomes."""
        ratio, unit = max(height / self.longest, width / self.longest), self.unit
        if ratio > 1:
            height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
        return ((height - 1) // unit + 1) * unit, ((width - 1) // unit + 1) * unit

    def text_of(self, num_rows: int, num_columns: int, last: Sequence[int]) -> str:
        """Return the text for an image in the prompt."""
        return _BREAK.join([_MARK * num_columns] * num_rows) + _END


def pixtral_images(
    settings: Mapping[str, Any], limits: FeatureLimits, token_id: Callable[[str], int | None]
) -> PixtralImages:
    """Return the rules of a model with these settings. Errors: ModelFileError, UnsupportedModelError."""
    check_settings(settings, BICUBIC)
    unit, size = limits.image_size, settings.get("size") or {"longest_edge": 1024}
    longest = size.get("longest_edge") if isinstance(size, Mapping) else None
    if type(longest) is not int or longest < 1:
        raise ModelFileError(
            f"{PROCESSOR_FILE}: size must have the longest side of an image as longest_edge, got {size!r:.80}"
        )
    side = (math.isqrt(4 * limits.most_rows + 5) - 1) // 2  # the largest with side * (side + 1) - 1 rows at most
    longest = min(longest, max(1, side) * unit)
    return PixtralImages(unit=unit, longest=longest, mark_id=find_token(token_id, _MARK, _BREAK, _END))
