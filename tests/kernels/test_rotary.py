"""Rotary frequencies and their scalings, against float64 formulas and the operations of the models' own code."""

import numpy as np
import pytest
import torch

from kernels import rotary
from kernels.torch.rope import rotary_tables
from kernels.torch.tensors import to_tensor


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6])
def test_frequencies_are_torchs_but_for_the_last_bit_of_a_few(head_dim, theta):
    """torch's power in float32 is not the nearest number everywhere, and is another one on other CPUs."""
    ours = rotary.rotary_frequencies(head_dim, theta)
    theirs = (1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)).numpy()
    assert ours.dtype == np.float32
    steps = np.abs(ours.view(np.int32) - theirs.view(np.int32))
    assert steps.max() <= 1
    assert (steps > 0).sum() <= head_dim // 40


def test_tables_are_those_of_torch():
    """The cosines and sines of float64 are rounded to float32, so one that differs in its last bit seldom shows."""
    positions, frequencies = np.arange(3000) * 7, rotary.rotary_frequencies(64, 1e4)
    expected = rotary_tables(torch.from_numpy(positions), to_tensor(frequencies), 1.25)
    for ours, theirs in zip(rotary.rotary_tables(positions, frequencies, 1.25), expected, strict=True):
        assert ours.shape == (3000, 64)
        assert np.array_equal(ours, theirs[:, 0].numpy())


def test_scaled_frequencies():
    """Each frequency equals its formula in float64; each of the three cases occurs."""
    plain = rotary.rotary_frequencies(64, 10_000.0)
    assert np.array_equal(rotary.linear(plain, 4.0), plain / 4)

    llama3, yarn = [], []
    begin, end = (64 * np.log(2048 / (turns * 2 * np.pi)) / (2 * np.log(10_000)) for turns in (32, 1))
    for index in range(32):
        frequency = 10_000.0 ** (-index / 32)
        turns = 256 * frequency / (2 * np.pi)  # within the original length
        share = np.clip((turns - 1) / (4 - 1), 0, 1)
        llama3.append(frequency * (share + (1 - share) / 8))
        share = 1 - np.clip((index - np.floor(begin)) / (np.ceil(end) - np.floor(begin)), 0, 1)
        yarn.append(frequency * (share + (1 - share) / 8))
    for got, expected in (
        (rotary.llama3(plain, 8.0, 1.0, 4.0, 256.0), np.array(llama3)),
        (rotary.yarn(64, 10_000.0, 8.0, 2048.0, 32.0, 1.0, True), np.array(yarn)),
    ):
        assert np.allclose(got, expected, rtol=1e-5, atol=0)
        ratio = got / plain
        assert float(ratio[0]) == 1
        assert float(ratio[-1]) == pytest.approx(1 / 8)
        assert ((ratio > 0.13) & (ratio < 0.99)).any()
    whole, parts = (rotary.yarn(64, 10_000.0, 8.0, 2048.0, 32.0, 1.0, truncate) for truncate in (True, False))
    assert not np.array_equal(whole, parts)
