"""ProcessedImages: images as features, cached for the next question about them, up to a number of bytes; the oldest are
dropped.
"""

import threading
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from frontend.images.rules import ImageRules
from ipc.wire.feature_messages import PIXELS, PutFeature, feature_digest

if TYPE_CHECKING:
    from PIL.Image import Image

#: Bytes of squares to keep: nine images of 17 squares of 512 x 512 pixels.
MAX_BYTES = 128 << 20
_STRIP_ROWS = 64  # hashed in one call


class ProcessedImage(NamedTuple):
    """The squares of an image as features, with their digests; see Squares."""

    squares: list[tuple[bytes, PutFeature]]
    num_rows: int
    num_columns: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the squares."""
        return sum(len(feature.data) for _, feature in self.squares)


class ProcessedImages:
    """A cache of one model's images, by their pixels. For any thread."""

    def __init__(self, rules: ImageRules, max_bytes: int = MAX_BYTES) -> None:
        self._rules, self._max_bytes = rules, max_bytes
        self._lock = threading.Lock()  # of both below
        self._by_pixels: OrderedDict[bytes, ProcessedImage] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self.num_made = 0

    def of(self, image: "Image") -> ProcessedImage:
        """Return an image, in RGB, as features."""
        digest = blake2b(digest_size=32, salt=b"%dx%d" % image.size)
        for top in range(0, image.height, _STRIP_ROWS):  # not a copy of the whole
            digest.update(image.crop((0, top, image.width, min(top + _STRIP_ROWS, image.height))).tobytes())
        key = digest.digest()
        with self._lock:
            if (found := self._by_pixels.get(key)) is not None:
                self._by_pixels.move_to_end(key)
                return found
        made = self._make(image)
        with self._lock:
            self.num_made += 1
            if key not in self._by_pixels:
                self._by_pixels[key] = made
                self._num_bytes += made.num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._by_pixels.popitem(last=False)[1].num_bytes
        return made

    def _make(self, image: "Image") -> ProcessedImage:
        cut = self._rules.squares_of(image)
        squares = []
        for pixels in cut.pixels:
            data, shape = pixels.tobytes(), list(pixels.shape)
            squares.append((feature_digest(PIXELS, shape, data), PutFeature(PIXELS, shape, data)))
        return ProcessedImage(squares, cut.num_rows, cut.num_columns)
