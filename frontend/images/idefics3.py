"""Idefics3Images: images by the rules of Idefics3 and SmolVLM: divided into squares, followed by the whole image.

The sizes are those of transformers' processors, in floats, step by step, because a size that rounds differently gives
another picture. Images are resized by Pillow's Lanczos filter, on 8 bits a colour.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from frontend.images.rules import PROCESSOR_FILE, Squares, check_settings
from ipc.errors import ModelFileError
from ipc.tables.arrays import UInt8s
from ipc.wire.feature_messages import FeatureLimits

if TYPE_CHECKING:
    from PIL.Image import Image

_MARK, _AROUND, _WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
_ONLY = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 1,
}  # 1 = Lanczos
#: No image is larger than this on its longer side, whatever a model's files say. Pixels.
_LONGEST = 4096


class Idefics3Images(NamedTuple):
    """The ImageRules of Idefics3 and SmolVLM."""

    longest_edge: int  # to which an image's longer side is resized, pixels
    square: int  # side of the squares that the vision encoder reads, pixels
    splits: bool  # an image is divided into squares, followed by the whole image
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
        side = self.square
        image = _resized(image, *_first_size(*image.size, self.longest_edge))
        if not self.splits:
            return Squares([_array(_resized(image, side, side))], 0, 0)
        image = _resized(image, *_whole_squares(*image.size, side))
        width, height = image.size
        if width <= side and height <= side:
            return Squares([_array(image)], 0, 0)
        numbers = _array(image)
        num_rows, num_columns = height // side, width // side
        pixels = [
            np.ascontiguousarray(numbers[row * side : (row + 1) * side, column * side : (column + 1) * side])
            for row in range(num_rows)
            for column in range(num_columns)
        ]
        return Squares([*pixels, _array(_resized(image, side, side))], num_rows, num_columns)

    def text_of(self, num_rows: int, num_columns: int) -> str:
        """Return the text for an image with these squares in the prompt."""
        marks = _MARK * self.rows_per_square
        text = ""
        for row in range(num_rows):
            for column in range(num_columns):
                text += f"{_AROUND}<row_{row + 1}_col_{column + 1}>{marks}"
            text += "\n"
        return f"{text}\n{_AROUND}{_WHOLE}{marks}{_AROUND}" if text else f"{_AROUND}{_WHOLE}{marks}{_AROUND}"


def idefics3_images(
    settings: Mapping[str, Any], limits: FeatureLimits, token_id: Callable[[str], int | None]
) -> Idefics3Images:
    """Return the rules of a model with these settings. Errors: ModelFileError, UnsupportedModelError."""
    check_settings(settings, _ONLY)
    square = _edge(settings, "max_image_size", 364)
    if square != limits.image_size:
        raise ModelFileError(
            f"{PROCESSOR_FILE}: max_image_size is {square}, but the vision encoder reads squares of {limits.image_size}"
        )
    if (mark_id := token_id(_MARK)) is None:
        raise ModelFileError(f"tokenizer.json has no token {_MARK}")
    longest = _edge(settings, "size", 4 * 364)
    return Idefics3Images(longest, square, bool(settings.get("do_image_splitting", True)), limits.image_rows, mark_id)


def _edge(settings: Mapping[str, Any], key: str, default: int) -> int:
    size = settings.get(key, {"longest_edge": default})
    edge = size.get("longest_edge") if isinstance(size, Mapping) else None
    if isinstance(edge, bool) or not isinstance(edge, int) or not 1 <= edge <= 1 << 14:
        raise ModelFileError(f"{PROCESSOR_FILE}: {key} must be {{'longest_edge': pixels}}, got {size!r:.80}")
    return edge


def _first_size(width: int, height: int, longest_edge: int) -> tuple[int, int]:
    """Return (width, height) with the longer side at longest_edge and the other one even, at most _LONGEST."""
    ratio = width / height
    if width >= height:
        width = longest_edge
        height = int(width / ratio)
        height += height % 2
    else:
        height = longest_edge
        width = int(height * ratio)
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _LONGEST:
        width, height = _LONGEST, int(_LONGEST / ratio)
    elif height > width and height > _LONGEST:
        width, height = int(_LONGEST * ratio), _LONGEST
    return max(width, 1), max(height, 1)


def _whole_squares(width: int, height: int, side: int) -> tuple[int, int]:
    """Return (width, height) rounded up to whole squares, the longer side first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return width, height


def _resized(image: "Image", width: int, height: int) -> "Image":
    from PIL.Image import Resampling

    return image.resize((width, height), Resampling.LANCZOS)


def _array(image: "Image") -> UInt8s:
    return np.asarray(image, np.uint8)
