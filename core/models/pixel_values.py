"""pixel_values: the numbers that encoders read for the values of a colour."""

import numpy as np

from ipc.tables.arrays import Floats


def pixel_values(
    mean: tuple[float, float, float], std: tuple[float, float, float], rescale_factor: float, *, at_once: bool = False
) -> Floats:
    """Return the number, float32 [3, 256], for each value of a colour, rounded as in transformers.

    at_once: as in its processors with torchvision, which do not rescale a colour, but its mean and deviation.
    """
    means, stds = np.array(mean, np.float32)[:, None], np.array(std, np.float32)[:, None]
    colours = np.arange(256)
    values = (colours * rescale_factor).astype(np.float32)
    if at_once:
        factor = np.float32(1 / rescale_factor)
        values, means, stds = colours.astype(np.float32), means * factor, stds * factor
    result: Floats = (values - means) / stds
    return result
