"""Idefics3Images: images by the rules of Idefics3 and SmolVLM: divided into squares, followed by the whole image.

The sizes are those of transformers' processors, in floats, step by step, because a size that rounds differently gives
another picture. Images are resized by Pillow's Lanczos filter, on 8 bits a colour.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from frontend.images.rules import LANCZOS, PROCESSOR_FILE, SquareRules, Squares, check_settings, cut, find_token
from ipc.errors import ModelFileError
from ipc.wire.feature_messages import FeatureLimits

if TYPE_CHECKING:
    from PIL.Image import Image

_MARK, _AROUND, _WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
#: No image is larger than this on its longer side, whatever a model's files say. Pixels.
_LONGEST = 4096


@dataclass(frozen=True, kw_only=True)
class Idefics3Images(SquareRules):
    """The ImageRules of Idefics3 and SmolVLM."""

    mark: ClassVar[str] = _MARK
    token: ClassVar[str] = _MARK
    resample: ClassVar[int] = LANCZOS
    longest_edge: int  # to which an image's longer side is resized, pixels
    splits: bool  # an image is divided into squares, followed by the whole image

    def squares_of(self, image: "Image") -> Squares:
        """Return the squares of an image in RGB."""
        image = self.resized(image, *_first_size(*image.size, self.longest_edge))
        if not self.splits:
            return Squares([self.whole(image)], 0, 0)
        image = self.resized(image, *_whole_squares(*image.size, self.square))
        pixels = cut(np.asarray(image, np.uint8), self.square)
        if len(pixels) == 1:
            return Squares(pixels, 0, 0)
        return Squares([*pixels, self.whole(image)], image.height // self.square, image.width // self.square)

    def text_of(self, num_rows: int, num_columns: int, last: Sequence[int]) -> str:
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
    check_settings(settings, LANCZOS)
    square = _edge(settings, "max_image_size", 364)
    if square != limits.image_size:
        raise ModelFileError(
            f"{PROCESSOR_FILE}: max_image_size is {square}, but the vision encoder reads squares of {limits.image_size}"
        )
    return Idefics3Images(
        longest_edge=_edge(settings, "size", 4 * 364),
        square=square,
        splits=bool(settings.get("do_image_splitting", True)),
        rows_per_square=limits.image_rows,
        mark_id=find_token(token_id, _MARK),
    )


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
