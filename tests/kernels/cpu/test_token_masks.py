"""Masks of allowed tokens: by the C kernel, in every variant, as by NumPy."""

import numpy as np
import pytest

from core.sampling.structured_outputs import Masked
from kernels.cpu.build import usable_variants
from kernels.cpu.library import load_cpu_library
from kernels.cpu.token_masks import CpuTokenMasks


@pytest.fixture(scope="module", params=usable_variants())
def kernel(request):
    library = load_cpu_library(request.param)
    library.start_threads(2)
    yield CpuTokenMasks(library)
    library.stop_threads()


@pytest.mark.parametrize(("size", "words"), [(1, 1), (31, 1), (32, 1), (320, 10), (1000, 32), (1001, 31), (49, 4)])
@pytest.mark.parametrize("count", [1, 5])
def test_only_allowed_tokens_keep_their_logits(kernel, size, words, count):
    rng = np.random.default_rng(size)
    logits = rng.normal(size=(7, size)).astype(np.float32)
    logits[2, 0] = float("nan")
    rows = rng.permutation(7)[:count]
    masks = rng.integers(0, 2**32, (count, words), np.uint32)
    masks[0, : words // 2] = 0
    masks[-1, words // 2 :] = 2**32 - 1
    by_kernel, by_numpy = logits.copy(), logits.copy()
    Masked(rows, masks, kernel).apply(by_kernel)
    padded = np.pad(masks, ((0, 0), (0, max(0, -(-size // 32) - words))))
    Masked(rows, padded).apply(by_numpy)
    assert np.array_equal(by_kernel.view(np.uint32), by_numpy.view(np.uint32))
    for row, mask in zip(rows, masks, strict=True):
        for token in range(size):
            is_allowed = token < 32 * words and mask[token // 32] >> (token % 32) & 1
            expected = logits[row, token] if is_allowed else -np.inf
            assert by_kernel[row, token] == expected or np.isnan(expected)
    others = np.setdiff1d(np.arange(7), rows)
    assert np.array_equal(by_kernel[others], logits[others], equal_nan=True)
