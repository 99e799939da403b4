"""pixel_values: the numbers that encoders read for the values of a colour."""

import numpy as np

from ipc.tables.arrays import Floats


def pixel_values(mean: tuple[float, float, float], std: tuple[float, float, float], rescale_factor: float) -> Floats:
    """Return the number, float32 [3, 256], for each value of a colour, rounded as in transformers."""
    scaled = (np.arange(256) * rescale_factor).astype(np.float32)
    values: Floats = (scaled - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]
    return values
