"""Packed matrices as GPTQ, AWQ, compressed-tensors and FP8 files have them, made from codes, zeros and scales."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ipc.tables.arrays import Floats
from kernels.rounding import ceil_div

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, torch.Tensor]


class Plain(NamedTuple):
    """A matrix [out, in]: weight = scale * (code - zero), with the scale and the zero of the column's group."""

    codes: NDArray[np.int64]  # [out, in], 0 to 2^bits - 1
    zeros: NDArray[np.int64]  # [out, groups]
    scales: Floats  # [out, groups]
    group_of: NDArray[np.int64]  # [in]
    bits: int

    @property
    def weights(self) -> Floats:
        """The weights in float32, from products in float64, which are exact for scales of 16 bits."""
        wide = self.scales.astype(np.float64)[:, self.group_of] * (self.codes - self.zeros[:, self.group_of])
        return wide.astype(np.float32)


def random_plain(
    shape: tuple[int, int], groups: int, bits: int, seed: int = 0, *, symmetric: bool = False, shuffled: bool = False
) -> Plain:
    """Random codes; the scales are float16 numbers for which weights lie within about -0.2 and 0.2."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    top = 1 << bits
    zeros = np.full((rows, groups), top // 2) if symmetric else rng.integers(0, top, (rows, groups))
    scales = (rng.uniform(0.1, 0.2, (rows, groups)) / top).astype(np.float16).astype(np.float32)
    group_of = np.arange(columns) // (columns // groups)
    if shuffled:
        group_of = rng.permutation(group_of)
    return Plain(rng.integers(0, top, shape), zeros, scales, group_of, bits)


def words(codes: NDArray[np.int64], bits: int) -> NDArray[np.int32]:
    """[n, count] -> int32 [n, words]: a row is one long integer, and its code i begins at bit i * bits."""
    size = ceil_div(codes.shape[1] * bits, 32) * 4
    rows = [sum(int(code) << (i * bits) for i, code in enumerate(row)).to_bytes(size, "little") for row in codes]
    return np.frombuffer(b"".join(rows), np.int32).reshape(len(codes), -1).copy()


def _tensor(array: NDArray[np.int32] | Floats, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)


def gptq(plain: Plain, *, is_less_one: bool) -> Tensors:
    """AutoGPTQ's and GPTQModel's tensors. Zeros less one: of the words, with borrows from code to code."""
    zeros = words(plain.zeros.T, plain.bits)
    if is_less_one:
        assert 32 % plain.bits == 0
        zeros = zeros - np.array([sum(1 << i for i in range(0, 32, plain.bits))], np.uint32).view(np.int32)
    return {
        "qweight": _tensor(words(plain.codes, plain.bits).T, torch.int32),
        "qzeros": _tensor(zeros, torch.int32),
        "scales": _tensor(plain.scales.T, torch.float16),
        "g_idx": _tensor(plain.group_of.astype(np.int32), torch.int32),
    }


def awq(plain: Plain) -> Tensors:
    """AutoAWQ's tensors, version GEMM: eight neighbouring columns of [in, out] in a word, in AWQ_ORDER."""
    assert plain.bits == 4

    def packed(codes: NDArray[np.int64]) -> torch.Tensor:
        eights = codes.reshape(len(codes), -1, 8)[:, :, AWQ_ORDER]
        return _tensor(words(eights.reshape(len(codes), -1), 4), torch.int32)

    return {
        "qweight": packed(plain.codes.T),
        "qzeros": packed(plain.zeros.T),
        "scales": _tensor(plain.scales.T, torch.float16),
    }


def compressed(plain: Plain, *, symmetric: bool) -> Tensors:
    """compressed-tensors' pack-quantized tensors."""
    tensors = {
        "weight_packed": _tensor(words(plain.codes, plain.bits), torch.int32),
        "weight_scale": _tensor(plain.scales, torch.float16),
        "weight_shape": torch.tensor(plain.codes.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _tensor(words(plain.zeros.T, plain.bits).T, torch.int32)
    if not np.array_equal(plain.group_of, np.sort(plain.group_of)):
        tensors["weight_g_idx"] = _tensor(plain.group_of.astype(np.int32), torch.int32)
    return tensors


def eight_bits(plain: Plain) -> Tensors:
    """compressed-tensors' int-quantized tensors: one scale for each row."""
    return {
        "weight": _tensor((plain.codes - 128).astype(np.int32), torch.int8),
        "weight_scale": _tensor(plain.scales, torch.float32),
    }
