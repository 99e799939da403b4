"""squares_of: an image as the squares of pixels that a vision encoder reads, by the rules of Idefics3 and SmolVLM.

The sizes are those of transformers' processors, in floats, step by step, since a size that rounds otherwise is another
picture. Images are resized by Pillow's Lanczos filter, on 8 bits a colour.
"""

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ipc.arrays import UInt8s

if TYPE_CHECKING:
    from PIL.Image import Image

#: No image is larger than this on its longer side, whatever a model's files say. Pixels.
_LONGEST = 4096


class Sizes(Protocol):
    """The sizes of a model's images."""

    @property
    def longest_edge(self) -> int:
        """To which an image's longer side is resized, pixels."""

    @property
    def square(self) -> int:
        """Side of a square, pixels."""

    @property
    def splits(self) -> bool:
        """Whether an image is cut into squares, and then comes once more as a whole."""


class Squares(NamedTuple):
    """The squares of one image: rows of columns, and the whole image last; 0 rows: the whole image alone."""

    pixels: list[UInt8s]  # [square, square, 3] each
    num_rows: int
    num_columns: int


def squares_of(image: "Image", sizes: Sizes) -> Squares:
    """Return the squares of an image in RGB."""
    side = sizes.square
    image = _resized(image, *_first_size(*image.size, sizes.longest_edge))
    if not sizes.splits:
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
