"""Soft caps of the C kernel against NumPy in float64."""

import numpy as np
import pytest

from kernels.cpu.elementwise import cap_logits
from kernels.cpu.library import load_cpu_library


@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_numbers_are_capped_with_the_precision_of_float32(cap: float) -> None:
    library = load_cpu_library()
    rng = np.random.default_rng(0)
    numbers = np.concatenate([rng.uniform(-12, 12, 7000), rng.uniform(-1e-3, 1e-3, 3000), [0.0, 1e30, -1e30]])
    numbers = (numbers * cap).astype(np.float32)[None]
    got = numbers.copy()
    cap_logits(library, got, cap)
    expected = cap * np.tanh(numbers.astype(np.float64) / cap)
    assert np.abs(got - expected).max() <= 4e-7 * cap
    assert (np.abs(got - expected) <= 5e-7 * np.abs(expected)).all()
    assert np.array_equal(np.sign(got), np.sign(numbers))


def test_a_number_is_its_own_and_nan_stays() -> None:
    library = load_cpu_library()
    numbers = np.random.default_rng(1).standard_normal((5, 37)).astype(np.float32) * 9
    together = numbers.copy()
    cap_logits(library, together, 4.0)
    for row, column in ((0, 0), (2, 15), (4, 36)):
        alone = numbers[row : row + 1, column : column + 1].copy()
        cap_logits(library, alone, 4.0)
        assert alone.tobytes() == together[row : row + 1, column : column + 1].tobytes()
    numbers[1, 3] = np.nan
    cap_logits(library, numbers, 4.0)
    assert np.isnan(numbers[1, 3])
    assert np.isnan(numbers).sum() == 1
