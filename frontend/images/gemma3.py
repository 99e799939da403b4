"""Gemma3Images: images by Gemma 3's rules: each becomes one square, whatever its shape.

Images are resized by Pillow's bilinear filter, on 8 bits a colour, as in transformers' Pillow backend. Its "pan and
scan", additional squares for long images, is off in the models' files, and refused if it is on.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from frontend.images.rules import PROCESSOR_FILE, Squares, check_settings
from ipc.errors import ModelFileError
from ipc.wire.feature_messages import FeatureLimits

if TYPE_CHECKING:
    from PIL.Image import Image

_BEGIN, _SOFT, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
_ONLY = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 2,
    "do_pan_and_scan": False,
}


class Gemma3Images(NamedTuple):
    """The ImageRules of Gemma 3."""

    side: int  # of a square, pixels
    rows_per_square: int
    mark_id: int

    @property
    def mark(self) -> str:
        """Return the text for an image in prompts."""
        return _BEGIN

    @property
    def token(self) -> str:
        """Return the text of the token for a row of an image."""
        return _SOFT

    def rows_of(self, shape: Sequence[int]) -> int:
        """Return the number of tokens for a square."""
        return self.rows_per_square

    def squares_of(self, image: "Image") -> Squares:
        """Return the square of an image in RGB."""
        from PIL.Image import Resampling

        resized = image.resize((self.side, self.side), Resampling.BILINEAR)
        return Squares([np.asarray(resized, np.uint8)], 0, 0)

    def text_of(self, num_rows: int, num_columns: int) -> str:
        """Return the text for an image in the prompt."""
        return f"\n\n{_BEGIN}{_SOFT * self.rows_per_square}{_END}\n\n"


def gemma3_images(
    settings: Mapping[str, Any], limits: FeatureLimits, token_id: Callable[[str], int | None]
) -> Gemma3Images:
    """Return the rules of a model with these settings. Errors: ModelFileError, UnsupportedModelError."""
    check_settings(settings, _ONLY)
    side, size = limits.image_size, settings.get("size", {"height": 224, "width": 224})
    if not isinstance(size, Mapping) or (size.get("height"), size.get("width")) != (side, side):
        raise ModelFileError(
            f"{PROCESSOR_FILE}: size is {size!r:.80}, but the vision encoder reads images of {side} x {side}"
        )
    ids = {token: token_id(token) for token in (_BEGIN, _SOFT, _END)}
    for token, number in ids.items():
        if number is None:
            raise ModelFileError(f"tokenizer.json has no token {token}")
    mark_id = ids[_SOFT]
    assert mark_id is not None, ids
    return Gemma3Images(side, limits.image_rows, mark_id)
