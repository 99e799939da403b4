"""Products whose exact result is zero, so that what is left shows the order of summation in every bit."""

import numpy as np
import torch
from numpy.typing import NDArray

_NUM_COLUMNS = 64


def cancelling_product(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a row [1, in] and a weight [out, in] whose exact product is zero.

    Terms come in pairs that cancel, far apart in K, with magnitudes over 2**12. (With ordinary numbers, bfloat16 output
    rounds the difference between two orders of summation away.)
    """
    rng = np.random.Generator(np.random.PCG64(in_features))
    half = in_features // 2
    bits = 8 if dtype == torch.bfloat16 else 23  # mantissas are exact in the dtype

    def numbers(*shape: int) -> NDArray[np.float32]:
        mantissas = rng.integers(2 ** (bits - 1), 2**bits, shape) * rng.choice((-1, 1), shape)
        result: NDArray[np.float32] = np.ldexp(mantissas.astype(np.float32), rng.integers(-3, 4, shape) - bits)
        return result

    row, columns = numbers(1, half), numbers(_NUM_COLUMNS, half)
    order = rng.permutation(2 * half)
    x = np.zeros((1, in_features), np.float32)
    w = np.zeros((_NUM_COLUMNS, in_features), np.float32)
    x[:, : 2 * half] = np.concatenate((row, row), 1)[:, order]
    w[:, : 2 * half] = np.concatenate((columns, -columns), 1)[:, order]
    repeats = -(-out_features // _NUM_COLUMNS)
    weight = torch.from_numpy(w).to(dtype).repeat(repeats, 1)[:out_features]
    return torch.from_numpy(x).to(dtype), weight
