"""Gemma3Images: images by Gemma 3's rules: each becomes one square, whatever its shape.

Images are resized by Pillow's bilinear filter, on 8 bits a colour, as in transformers' Pillow backend. Its "pan and
scan", additional squares for long images, is off in the models' files, and refused if it is on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from frontend.images.rules import BILINEAR, SquareRules, Squares, check_settings, check_side, find_token
from ipc.wire.feature_messages import FeatureLimits

if TYPE_CHECKING:
    from PIL.Image import Image

_BEGIN, _SOFT, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


@dataclass(frozen=True, kw_only=True)
class Gemma3Images(SquareRules):
    """The ImageRules of Gemma 3."""

    mark: ClassVar[str] = _BEGIN
    token: ClassVar[str] = _SOFT
    resample: ClassVar[int] = BILINEAR

    def squares_of(self, image: "Image") -> Squares:
        """Return the square of an image in RGB."""
        return Squares([self.whole(image)], 0, 0)

    def text_of(self, num_rows: int, num_columns: int, last: Sequence[int]) -> str:
        """Return the text for an image in the prompt."""
        return f"\n\n{_BEGIN}{_SOFT * self.rows_per_square}{_END}\n\n"


def gemma3_images(
    settings: Mapping[str, Any], limits: FeatureLimits, token_id: Callable[[str], int | None]
) -> Gemma3Images:
    """Return the rules of a model with these settings. Errors: ModelFileError, UnsupportedModelError."""
    check_settings(settings, BILINEAR, do_pan_and_scan=False)
    check_side(settings, 224, limits.image_size)
    mark_id = find_token(token_id, _SOFT, _BEGIN, _END)
    return Gemma3Images(square=limits.image_size, rows_per_square=limits.image_rows, mark_id=mark_id)
