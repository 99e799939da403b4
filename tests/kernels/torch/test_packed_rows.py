"""Packed rows stand for the numbers of dequantize(), bit for bit, and quantized ones are those of the C kernels."""

import numpy as np
import pytest
import torch

from kernels.arrays import UInt8s
from kernels.cpu.library import load_cpu_library
from kernels.cpu.quantized import BlockRows, in_q8_0
from kernels.dequantize import BLOCK_SIZES, dequantize
from kernels.torch import packed_rows
from kernels.torch.packed_rows import PackedRows, join, pack_blocks, quantize_rows, unpack
from tests.kernels.block_scales import set_scales, without_nan
from tests.triton_device import DEVICE

#: The types, and the bytes of a block that are float16.
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "FP8": (),
}
#: Bits of a weight of 512 with its part of the scales. Types of five and six bits take eight.
BITS = {
    "Q8_0": 8.5,
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q5_0": 8.5,
    "Q5_1": 9,
    "Q4_K": 4.75,
    "Q5_K": 8.75,
    "Q6_K": 8.625,
    "FP8": 8.5,
}


def random_blocks(type_name: str, rows: int, depth: int, scale: float = 0.01) -> UInt8s:
    """Rows uint8 [rows, bytes] of random codes; scales and minima are about `scale`."""
    rng = np.random.default_rng(rows)
    weights, num_bytes = BLOCK_SIZES[type_name]
    blocks = rng.integers(0, 256, (rows, depth // weights, num_bytes), np.uint8)
    for place in HALVES[type_name]:
        halves = (rng.standard_normal(blocks.shape[:2]) * scale).astype("<f2")
        blocks[:, :, place : place + 2] = halves[:, :, None].view(np.uint8)
    if type_name == "FP8":
        set_scales(without_nan(blocks, type_name), type_name, rng.standard_normal((*blocks.shape[:2], 1)) * scale / 100)
    return blocks.reshape(rows, -1)


def packed_blocks(blocks: UInt8s, type_name: str, device: torch.device) -> PackedRows:
    packed = pack_blocks(blocks, type_name, device)
    assert packed is not None
    return packed


def numbers_of(blocks: UInt8s, type_name: str) -> torch.Tensor:
    return torch.from_numpy(dequantize(blocks.reshape(-1), type_name).reshape(len(blocks), -1))


@pytest.mark.parametrize("type_name", HALVES)
def test_packed_rows_are_the_weights_of_the_blocks(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they are converted piece by piece."""
    blocks = random_blocks(type_name, 7, 512)
    packed = packed_blocks(blocks, type_name, DEVICE)
    assert torch.equal(unpack(packed).cpu(), numbers_of(blocks, type_name))
    assert packed.num_bytes * 8 == 7 * 512 * BITS[type_name]
    monkeypatch.setattr(packed_rows, "_CHUNK", 1024)
    assert torch.equal(unpack(packed_blocks(blocks, type_name, DEVICE)), unpack(packed))


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0"])
def test_rows_that_are_no_two_halves_of_groups(type_name: str) -> None:
    blocks = random_blocks(type_name, 3, 96)
    packed = packed_blocks(blocks, type_name, DEVICE)
    assert not packed.in_4_bits
    assert torch.equal(unpack(packed).cpu(), numbers_of(blocks, type_name))


def narrow_blocks(rows: int, depth: int) -> UInt8s:
    """Q5_0 whose blocks have 16 neighbouring codes each, the first of them anywhere from 0 to 16."""
    rng = np.random.default_rng(0)
    blocks = random_blocks("Q5_0", rows, depth).reshape(-1, 22)
    codes = rng.integers(0, 16, (len(blocks), 32)) + rng.integers(0, 17, (len(blocks), 1))
    blocks[:, 2:6] = np.packbits(codes >> 4, axis=1, bitorder="little")
    blocks[:, 6:] = (codes[:, :16] & 15) | (codes[:, 16:] & 15) << 4
    return blocks.reshape(rows, -1)


def test_five_bits_that_are_four_with_zeros_take_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_rows, "_CHUNK", 1024)
    blocks = narrow_blocks(7, 512)
    packed = packed_blocks(blocks, "Q5_0", DEVICE)
    assert packed.in_4_bits
    assert packed.num_bytes * 8 == 7 * 512 * 5.5
    assert torch.equal(unpack(packed).cpu(), numbers_of(blocks, "Q5_0"))
    assert not packed_blocks(narrow_blocks(3, 96), "Q5_0", DEVICE).in_4_bits  # no two halves of groups
    blocks[-1, 2:6], blocks[-1, 6:22] = [255, 255, 0, 0], 15 * 16 + 15  # codes 31 and 15
    assert not packed_blocks(blocks, "Q5_0", DEVICE).in_4_bits
    assert torch.equal(unpack(packed_blocks(blocks, "Q5_0", DEVICE)).cpu(), numbers_of(blocks, "Q5_0"))


def test_rows_of_one_kind_are_joined() -> None:
    parts = [packed_blocks(random_blocks("Q4_K", rows, 512), "Q4_K", DEVICE) for rows in (3, 5)]
    assert parts[0].joins(parts[1])
    assert torch.equal(unpack(join(parts)), torch.cat([unpack(part) for part in parts]))
    assert torch.equal(unpack(join(parts).rows(2, 4)), torch.cat([unpack(part) for part in parts])[2:4])
    for other in ("Q4_0", "Q4_1", "Q6_K", "Q5_K", "FP8"):
        assert not parts[0].joins(packed_blocks(random_blocks(other, 3, 512), other, DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantized_rows_are_those_of_the_c_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_rows, "_CHUNK", 100)
    numbers = torch.randn(9, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    numbers[0, :32] = 0
    numbers[1, :32] = torch.arange(32) + 0.5  # with 127 as the largest: halves
    numbers[1, 0] = 127
    packed = quantize_rows(numbers.to(DEVICE))
    name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    expected = in_q8_0(load_cpu_library(), BlockRows(name, numbers.view(torch.uint8).numpy()))
    assert packed is not None
    assert expected is not None
    assert all(map(torch.equal, packed[:2], packed_blocks(expected.data, "Q8_0", DEVICE)[:2]))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e7, 1e-39])
def test_numbers_without_a_scale_are_not_quantized(number: float) -> None:
    numbers = torch.ones(3, 64)
    assert quantize_rows(numbers) is not None
    numbers[1, 32:] = number
    assert quantize_rows(numbers) is None
    assert quantize_rows(torch.ones(3, 72)) is None


def test_mxfp4_has_codes_of_eight_bits() -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (7, 16, 17), np.uint8)
    blocks[..., 0] = np.random.default_rng(1).integers(104, 144, (7, 16))
    blocks[3, 2, 1:] &= 0x88  # zeros, some of them negative: their exponent does not count
    blocks[3, 2, 0] = 0
    rows = blocks.reshape(7, -1)
    packed = packed_blocks(rows, "MXFP4", DEVICE)
    assert packed.num_bytes * 8 == 7 * 512 * 8.5
    assert torch.equal(unpack(packed).cpu(), numbers_of(rows, "MXFP4"))
    for exponent in (103, 144):  # a scale that is no float16
        blocks[3, 3, 0] = exponent
        assert pack_blocks(rows, "MXFP4", DEVICE) is None


def test_types_without_a_layout_are_to_be_dense() -> None:
    assert pack_blocks(np.zeros((2, 136), np.uint8), "IQ4_XS", DEVICE) is None
