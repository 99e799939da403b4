"""ImageRules: how one kind of model receives images: as squares of pixels, and as marks in the prompt."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ipc.errors import UnsupportedModelError
from ipc.tables.arrays import UInt8s

if TYPE_CHECKING:
    from PIL.Image import Image

#: The file of a model with the preprocessing of its images.
PROCESSOR_FILE = "preprocessor_config.json"


class Squares(NamedTuple):
    """The squares of one image: rows of columns, and the whole image last; 0 rows: the whole image alone.

    If images have any size, it is one rectangle, which becomes rows of columns of tokens.
    """

    pixels: list[UInt8s]  # [side, side, 3] each; [height, width, 3]
    num_rows: int
    num_columns: int


class ImageRules(Protocol):
    """The rules of one kind of model."""

    @property
    def mark(self) -> str:
        """Return the text for an image in the prompts of callers and chat templates."""

    @property
    def token(self) -> str:
        """Return the text of the token for a row of a square."""

    def rows_of(self, shape: Sequence[int]) -> int:
        """Return the number of tokens for a square of this shape."""

    @property
    def mark_id(self) -> int:
        """Return the id of that token."""

    def squares_of(self, image: "Image") -> Squares:
        """Return the squares of an image in RGB."""

    def text_of(self, num_rows: int, num_columns: int) -> str:
        """Return the text for an image with these squares in the prompt."""


def check_settings(settings: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    """Check settings that have one supported value; None counts as that. Errors: UnsupportedModelError."""
    for key, value in only.items():
        if settings.get(key) not in (None, value):
            raise UnsupportedModelError(
                f"{PROCESSOR_FILE}: {key}={settings[key]!r:.80} is not supported: only {value!r} is"
            )
