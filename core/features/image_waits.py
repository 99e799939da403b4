"""ImageWaits: how long the images of a step may take, for who watches an engine's steps."""

import time
from typing import NamedTuple

import numpy as np

from core.features.store import Features, ImageEncoder

#: Rows in each direction of the image with which the time of encoders for any size is measured.
_TRIAL_SIDE = 8
#: For each so many rows of an image, a row takes as long once more as one of that image: it sees more patches.
_TRIAL_ROWS = 256


class ImageWaits(NamedTuple):
    """How long a step may take longer than one without images, in ns; 0 = there is no encoder."""

    whole_ns: int = 0  # with images that it encodes whole
    part_ns: int = 0  # with a part of a large one


NO_WAITS = ImageWaits()


def image_waits(features: Features | None, num_tokens: int, *, has_parts: bool) -> ImageWaits:
    """Measure how long the encoder takes. num_tokens: of images that a step may encode, also of the largest image.

    has_parts: images of several parts are encoded in these; if not, whole.
    """
    encoder = None if features is None else features.encoder
    if encoder is None:
        return NO_WAITS
    side = _TRIAL_SIDE if encoder.any_size else 1
    begin = time.perf_counter_ns()
    encoder.encode(np.zeros((side * encoder.image_size, side * encoder.image_size, 3), np.uint8))
    taken = time.perf_counter_ns() - begin
    if not encoder.any_size:
        return ImageWaits(taken * num_tokens // encoder.num_rows)

    def expected(largest: int) -> int:
        return taken * (4 + largest // _TRIAL_ROWS) * num_tokens // side**2

    if not has_parts or encoder.num_parts(num_tokens) == 1:
        return ImageWaits(expected(num_tokens))
    part_ns = expected(num_tokens) // encoder.num_parts(num_tokens)
    return ImageWaits(expected(min(num_tokens, _most_of_one_part(encoder, num_tokens))), part_ns)


def _most_of_one_part(encoder: ImageEncoder, num_rows: int) -> int:
    """Return about the rows of the largest image of one part, and not less. num_rows: of one that has several."""
    while num_rows > 1 and encoder.num_parts(num_rows) > 1:
        num_rows //= 2
    return 2 * num_rows + 1
