"""How long a step with images may take: with whole ones, and with a part of a large one."""

import itertools

import numpy as np
import pytest

from core.features import image_waits as module
from core.features.image_waits import NO_WAITS, ImageWaits, image_waits
from core.features.store import Features
from tests.placed_images import SquareEncoder

_TRIAL_NS = 6400


class Encoder(SquareEncoder):
    """Takes images of any size; those of more than 512 rows in parts."""

    image_size, num_rows, width, any_size, sees_whole = 4, 16384, 8, True, False

    def num_parts(self, num_rows: int) -> int:
        return -(-num_rows // 512)

    def encode(self, pixels: object) -> np.ndarray:
        return np.zeros((64, self.width), np.float32)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(0, _TRIAL_NS)
    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: next(times))


def features(encoder: object) -> Features:
    return Features(8, encoder)  # type: ignore[arg-type]


def test_a_part_of_a_large_image_takes_its_share() -> None:
    """A row takes 100 ns in the trial, four times that is expected, and once more for each 256 rows of its image."""
    whole = 100 * (4 + 16384 // 256) * 16384
    small = 100 * (4 + 1025 // 256) * 16384
    assert image_waits(features(Encoder()), 16384, has_parts=True) == ImageWaits(small, whole // 32)
    assert image_waits(features(Encoder()), 16384, has_parts=False) == ImageWaits(whole)
    assert image_waits(features(Encoder()), 512, has_parts=True) == ImageWaits(100 * (4 + 2) * 512)


def test_images_of_one_size_are_whole() -> None:
    encoder = Encoder()
    encoder.any_size, encoder.num_rows = False, 64
    assert image_waits(features(encoder), 128, has_parts=True) == ImageWaits(2 * _TRIAL_NS)
    assert image_waits(features(None), 0, has_parts=True) is image_waits(None, 0, has_parts=True) is NO_WAITS
