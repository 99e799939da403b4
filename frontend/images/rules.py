"""ImageRules: how one kind of model receives images: as squares or rectangles of pixels, and as marks in the prompt."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.tables.arrays import UInt8s

if TYPE_CHECKING:
    from PIL.Image import Image

#: The file of a model with the preprocessing of its images.
PROCESSOR_FILE = "preprocessor_config.json"
#: Pillow's filters, as `resample` in this file names them.
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3


class Squares(NamedTuple):
    """The squares of one image: rows of columns, and the whole image last; 0 rows: the whole image alone.

    If images have any size, it is one rectangle, which becomes rows of columns of tokens.
    """

    pixels: list[UInt8s]  # [side, side, 3] each; [height, width, 3]
    num_rows: int
    num_columns: int


@dataclass(frozen=True, kw_only=True)
class ImageRules(ABC):
    """The rules of one kind of model."""

    mark: ClassVar[str]  # the text for an image in the prompts of callers and chat templates
    token: ClassVar[str]  # the text of the token for a row of an image
    resample: ClassVar[int]  # Pillow's filter, which works on 8 bits a colour
    mark_id: int  # of `token`

    @abstractmethod
    def rows_of(self, shape: Sequence[int]) -> int:
        """Return the number of tokens for a square or a rectangle of this shape."""

    @abstractmethod
    def squares_of(self, image: "Image") -> Squares:
        """Return the squares of an image in RGB. Errors: InvalidRequestError."""

    @abstractmethod
    def text_of(self, num_rows: int, num_columns: int, last: Sequence[int]) -> str:
        """Return the text for an image with these squares in the prompt. last: shape of the last of them."""

    def marks_of(self, shape: Sequence[int]) -> int:
        """Return how many times the text for an image has `token` for a square or a rectangle of this shape."""
        return self.rows_of(shape)

    def resized(self, image: "Image", width: int, height: int) -> "Image":
        """Return an image with this size."""
        from PIL.Image import Resampling

        return image if image.size == (width, height) else image.resize((width, height), Resampling(self.resample))


@dataclass(frozen=True, kw_only=True)
class RectangleRules(ImageRules):
    """Rules of models whose images keep about their shape: each becomes one rectangle."""

    unit: int  # pixels; a square of this side becomes one row

    def rows_of(self, shape: Sequence[int]) -> int:
        """Return the number of tokens for an image of this shape."""
        return (shape[0] // self.unit) * (shape[1] // self.unit)

    def squares_of(self, image: "Image") -> Squares:
        """Return an image in RGB as one rectangle. Errors: InvalidRequestError for one that is too long."""
        height, width = self.size_of(image.height, image.width)
        pixels = np.asarray(self.resized(image, width, height), np.uint8)
        return Squares([pixels], height // self.unit, width // self.unit)

    @abstractmethod
    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the rectangle that an image becomes: multiples of unit.

        Errors: InvalidRequestError.
        """


@dataclass(frozen=True, kw_only=True)
class SquareRules(ImageRules):
    """Rules of models whose encoders read squares of one size."""

    square: int  # side of the squares, pixels
    rows_per_square: int

    def rows_of(self, shape: Sequence[int]) -> int:
        """Return the number of tokens for a square."""
        return self.rows_per_square

    def whole(self, image: "Image") -> UInt8s:
        """Return the whole image as one square."""
        return np.asarray(self.resized(image, self.square, self.square), np.uint8)


def cut(pixels: UInt8s, side: int) -> list[UInt8s]:
    """Return the squares of an image that is as large as rows and columns of them, row by row."""
    return [
        np.ascontiguousarray(pixels[top : top + side, left : left + side])
        for top in range(0, pixels.shape[0], side)
        for left in range(0, pixels.shape[1], side)
    ]


def nearest_grid(size: tuple[int, int], side: int, grids: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return which (columns, rows) of squares have the shape nearest to that of an image of this (width, height).

    Of two that are equally near, the later one is taken, if the image has more than half of its pixels.
    """
    best, nearest = (1, 1), float("inf")
    for columns, rows in grids:
        distance = abs(size[0] / size[1] - columns / rows)
        is_larger = size[0] * size[1] > 0.5 * side * side * columns * rows
        if distance < nearest or (distance == nearest and is_larger):
            best, nearest = (columns, rows), distance
    return best


def whole_units(height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """Return (height, width) nearest to these that are multiples of unit, with least to most pixels together."""
    rows, columns = max(1, round(height / unit)), max(1, round(width / unit))
    if rows * columns * unit**2 > most:
        shrinks = math.sqrt(height * width / most)
        rows = max(1, math.floor(height / shrinks / unit))
        columns = max(1, math.floor(width / shrinks / unit))
    elif rows * columns * unit**2 < least:
        grows = math.sqrt(least / (height * width))
        rows, columns = math.ceil(height * grows / unit), math.ceil(width * grows / unit)
    return rows * unit, columns * unit


def check_settings(settings: Mapping[str, Any], resample: int, **only: Any) -> None:
    """Check settings that have one supported value; None counts as that. only: of those that not all models have.

    Errors: UnsupportedModelError.
    """
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        only.setdefault(key, True)
    for key, value in {**only, "resample": resample}.items():
        if settings.get(key) not in (None, value):
            raise UnsupportedModelError(
                f"{PROCESSOR_FILE}: {key}={settings[key]!r:.80} is not supported: only {value!r} is"
            )


def check_side(settings: Mapping[str, Any], default: int, side: int) -> None:
    """Check that `size` is that of the encoder's squares. Errors: ModelFileError."""
    size = settings.get("size") or {"height": default, "width": default}
    if not isinstance(size, Mapping) or (size.get("height"), size.get("width")) != (side, side):
        raise ModelFileError(
            f"{PROCESSOR_FILE}: size is {size!r:.80}, but the vision encoder reads squares of {side} x {side}"
        )


def find_token(token_id: Callable[[str], int | None], token: str, *around: str) -> int:
    """Return the id of a token for images. around: further tokens that images need. Errors: ModelFileError."""
    ids = {name: token_id(name) for name in (token, *around)}
    for name, number in ids.items():
        if number is None:
            raise ModelFileError(f"tokenizer.json has no token {name}")
    mark_id = ids[token]
    assert mark_id is not None, ids
    return mark_id
