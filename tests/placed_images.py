"""Images as features, for tests of the engine alone: a client makes them in frontend/images/."""

import numpy as np
import numpy.typing as npt

from ipc.wire.feature_messages import PIXELS, FeatureUse, PutFeature, feature_digest
from ipc.wire.placed_feature import PlacedFeature


def placed_image(pixels: npt.NDArray[np.uint8], position: int, num_rows: int) -> PlacedFeature:
    """An image [height, width, 3] that stands for num_rows tokens from `position` on."""
    data, shape = pixels.tobytes(), list(pixels.shape)
    use = FeatureUse(position, num_rows, feature_digest(PIXELS, shape, data))
    return PlacedFeature(use, PutFeature(PIXELS, shape, data))
