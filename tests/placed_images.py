"""Images as features, for tests of the engine alone: a client makes them in frontend/images/."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core.features.store import ImageRun
from ipc.errors import InvalidRequestError
from ipc.wire.feature_messages import PIXELS, FeatureUse, PutFeature, feature_digest
from ipc.wire.placed_feature import PlacedFeature


def placed_image(pixels: npt.NDArray[np.uint8], position: int, num_rows: int) -> PlacedFeature:
    """An image [height, width, 3] that stands for num_rows tokens from `position` on."""
    data, shape = pixels.tobytes(), list(pixels.shape)
    use = FeatureUse(position, num_rows, feature_digest(PIXELS, shape, data))
    return PlacedFeature(use, PutFeature(PIXELS, shape, data))


class SquareEncoder:
    """What an encoder says of its images if all have one size: the sizes are a test's."""

    image_size = num_rows = 0
    any_size = False

    def grid_of(self, shape: Sequence[int]) -> tuple[int, int]:
        side = self.image_size
        if list(shape) != [side, side, 3]:
            raise InvalidRequestError(f"images for this model must have the shape [{side}, {side}, 3]; got {shape}")
        return self.num_rows, 0

    def num_parts(self, num_rows: int) -> int:
        return 1

    def begin(self, pixels: npt.NDArray[np.uint8]) -> ImageRun:
        raise AssertionError("its images are encoded whole")

    def pixel_bytes(self, num_rows: int) -> int:
        return 3 * self.image_size**2 if num_rows == self.num_rows else 0
