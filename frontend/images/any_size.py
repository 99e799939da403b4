"""AnySizeImages: images by the rules of Qwen's models: each keeps about its size and shape.

Both sides become multiples of a unit, and the number of pixels stays between two bounds, as in transformers'
processors. Images are resized by Pillow's bicubic filter, on 8 bits a colour, as in transformers' Pillow backend.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from frontend.images.rules import BICUBIC, PROCESSOR_FILE, RectangleRules, check_settings, find_token, whole_units
from ipc.errors import InvalidRequestError, ModelFileError
from ipc.wire.feature_messages import FeatureLimits

_MARK = "<|image_pad|>"
_MOST_RATIO = 200  # of an image's sides


@dataclass(frozen=True, kw_only=True)
class AnySizeImages(RectangleRules):
    """The ImageRules of Qwen's models."""

    mark: ClassVar[str] = _MARK
    token: ClassVar[str] = _MARK
    resample: ClassVar[int] = BICUBIC
    least: int  # pixels of an image
    most: int

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the rectangle that an image becomes. Errors: InvalidRequestError."""
        if max(height, width) > _MOST_RATIO * min(height, width):
            raise InvalidRequestError(
                f"an image of {width} x {height} pixels is too long for this model: one side may be at most "
                f"{_MOST_RATIO} times the other"
            )
        return whole_units(height, width, self.unit, self.least, self.most)

    def text_of(self, num_rows: int, num_columns: int, last: Sequence[int]) -> str:
        """Return the text for an image in the prompt."""
        return _MARK * (num_rows * num_columns)


def any_size_images(
    settings: Mapping[str, Any], limits: FeatureLimits, token_id: Callable[[str], int | None]
) -> AnySizeImages:
    """Return the rules of a model with these settings. Errors: ModelFileError, UnsupportedModelError."""
    check_settings(settings, BICUBIC)
    unit, size = limits.image_size, settings.get("size") or {}
    own = settings.get("patch_size", 14), settings.get("merge_size", 2)
    if any(type(one) is not int for one in own) or own[0] * own[1] != unit or not limits.any_size:
        raise ModelFileError(
            f"{PROCESSOR_FILE}: patch_size and merge_size are {own[0]!r:.80} and {own[1]!r:.80}, but the vision "
            f"encoder makes one row of {unit} x {unit} pixels"
        )
    if not isinstance(size, Mapping):
        raise ModelFileError(f"{PROCESSOR_FILE}: size must be an object, got {size!r:.80}")
    least = settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    if any(type(one) is not int or one < 1 for one in (least, most)) or least > most:
        raise ModelFileError(
            f"{PROCESSOR_FILE}: size must have the fewest and the most pixels of an image as shortest_edge and "
            f"longest_edge, got {least!r:.80} and {most!r:.80}"
        )
    most = min(most, limits.most_rows * unit**2)
    mark_id = find_token(token_id, _MARK)
    return AnySizeImages(unit=unit, least=min(least, most), most=most, mark_id=mark_id)
