"""Dequantization, bit for bit against the gguf package."""

import gguf
import numpy as np
import pytest
import torch

from kernels.cpu.build import usable_variants
from kernels.cpu.dequantize import cpu_dequantize, has_cpu_kernel
from kernels.cpu.library import load_cpu_library
from kernels.dequantize import BLOCK_SIZES, FILE_TYPES, FLOAT_LEVELS, LEVELS, dequantize
from kernels.elements import BFLOAT16, FLOAT32, rounded
from tests.kernels.block_scales import BYTE_SCALES, TYPES, WIDE_SCALES, num_scales, set_scales, without_nan


def random_blocks(type_name: str, count: int, seed: int) -> np.ndarray:
    """uint8[count, bytes of a block], with finite scales of all magnitudes."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, BLOCK_SIZES[type_name][1]), dtype=np.uint8)
    if type_name in WIDE_SCALES:
        exponents = rng.integers(20, 230, (count, 1), np.uint32)
        bits = exponents << 23 | rng.integers(0, 1 << 23, (count, 1), np.uint32) | rng.integers(0, 2, (count, 1)) << 31
        set_scales(without_nan(blocks, type_name), type_name, bits.astype(np.uint32).view(np.float32))
    elif type_name == "MXFP4":
        blocks[:, 0] = rng.integers(0, 250, count)
    elif type_name in TYPES and type_name not in BYTE_SCALES:
        # float16 of exponents 0 (subnormal) to 30, either sign
        shape = count, num_scales(type_name)
        halves = rng.integers(0, 0x7C00, shape, np.uint16) | rng.integers(0, 2, shape, np.uint16) << 15
        set_scales(blocks, type_name, halves.view(np.float16))
    return blocks


@pytest.mark.parametrize("type_name", FILE_TYPES)
@pytest.mark.parametrize("count", [1, 3, 5000])
def test_bits_equal_those_of_the_gguf_package(type_name: str, count: int) -> None:
    blocks = random_blocks(type_name, count, seed=count)
    kind = gguf.GGMLQuantizationType[type_name]
    with np.errstate(invalid="ignore"):  # F16 and F32 of random bits hold signalling NaNs
        expected = gguf.dequantize(blocks, kind).reshape(-1)
        found = dequantize(blocks.reshape(-1), type_name)
    assert found.dtype == FLOAT32
    assert found.shape == (count * BLOCK_SIZES[type_name][0],)
    numbers = ~np.isnan(expected)
    assert numbers.sum() > 0.9 * numbers.size
    assert np.array_equal(found.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])
    assert np.array_equal(np.isnan(found), ~numbers)


@pytest.mark.parametrize("variant", usable_variants())
@pytest.mark.parametrize("type_name", TYPES)
def test_the_c_kernel_gives_the_same_bits(type_name: str, variant: str) -> None:
    library = load_cpu_library(variant)
    blocks = random_blocks(type_name, 1003, seed=1).reshape(-1)
    numbers = dequantize(blocks, type_name)
    assert np.isfinite(numbers).all()
    for dtype in (FLOAT32, BFLOAT16):
        assert has_cpu_kernel(type_name, dtype)
        found = cpu_dequantize(library, blocks, type_name, dtype)
        assert found.dtype == dtype
        assert found.tobytes() == rounded(numbers, dtype).tobytes()
    with pytest.raises(ValueError, match="reshape"):
        cpu_dequantize(library, blocks[1:], type_name, FLOAT32)


def test_every_type_that_the_gguf_package_dequantizes_is_known() -> None:
    assert {kind.name for kind in gguf.quants._type_traits} <= set(FILE_TYPES)


def wide(blocks: np.ndarray, name: str) -> np.ndarray:
    """The numbers of blocks of a type with a float32, one after the other."""
    first, packed = blocks[:, :4].copy().view(np.float32)[:, 0], blocks[:, 4:]
    out = np.empty((len(blocks), 64), np.float32)
    for block, codes in enumerate(packed):
        for i in range(64):
            if name == "FP8":
                number = torch.tensor(codes[i : i + 1]).view(torch.float8_e4m3fn).float().numpy()[0]
                out[block, i] = number * first[block]
            elif name == "NVFP4_F32":
                half = np.array([codes[i // 16]], np.uint16) << 7
                scale = half.view(np.float16).astype(np.float32)[0] * np.float32(128) / first[block]
                code = codes[4 + i // 2] >> i % 2 * 4 & 15
                out[block, i] = np.float32(LEVELS[name][code]) * scale
            else:
                code = codes[i // 2] >> (1 - i % 2) * 4 & 15
                out[block, i] = np.float32(FLOAT_LEVELS[name][code]) * first[block]
    return out


def test_fp8_has_the_numbers_of_torch() -> None:
    blocks = random_blocks("FP8", 300, seed=3)
    blocks[:8, 4:] = np.arange(256, dtype=np.uint8).reshape(4, 64).repeat(2, 0)
    expected = wide(blocks, "FP8").reshape(-1)
    found = dequantize(blocks.reshape(-1), "FP8")
    assert np.isnan(expected).sum() == 4
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("name", TYPES)
def test_blocks_of_any_bytes(name: str) -> None:
    """Blocks are from strangers: all bits set or none, NaN and infinite scales; the C kernel gives the same numbers."""
    library = load_cpu_library()
    blocks = random_blocks(name, 8, seed=2)
    blocks[0], blocks[1] = 0xFF, 0
    for row, value in ((2, np.nan), (3, np.inf), (4, -np.inf), (5, 0.0)):
        set_scales(blocks[row : row + 1], name, value)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        expected = (
            wide(blocks, name) if name in WIDE_SCALES else gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
        )
        expected = expected.reshape(-1)
        found = dequantize(blocks.reshape(-1), name)
    compiled = cpu_dequantize(library, blocks.reshape(-1), name, FLOAT32)
    is_number = ~np.isnan(expected)
    for numbers in (found, compiled):
        assert np.array_equal(np.isnan(numbers), ~is_number)
        assert np.array_equal(numbers.view(np.uint32)[is_number], expected.view(np.uint32)[is_number])


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for name in FILE_TYPES:
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == BLOCK_SIZES[name]


def test_known_answers() -> None:
    half = np.array([0.5, -2.0], np.float16).tobytes()
    low_high = bytes([0x0F, 0xF0, *range(2, 16)])
    q4_1 = dequantize(np.frombuffer(half + low_high, np.uint8), "Q4_1")
    assert q4_1[[0, 1, 2, 16, 17, 18]].tolist() == [5.5, -2.0, -1.0, -2.0, 5.5, -2.0]
    q4_0 = dequantize(np.frombuffer(half[:2] + low_high, np.uint8), "Q4_0")
    assert q4_0[[0, 1, 2, 16, 17, 18]].tolist() == [3.5, -4.0, -3.0, -4.0, 3.5, -4.0]
    q8_0 = dequantize(np.frombuffer(half[:2] + bytes([255, 128, 127] + [0] * 29), np.uint8), "Q8_0")
    assert q8_0[:4].tolist() == [-0.5, -64.0, 63.5, 0.0]


def test_a_slice_of_a_larger_buffer() -> None:
    blocks = random_blocks("Q4_1", 10, seed=0)
    whole = np.concatenate([np.zeros(32, np.uint8), blocks.reshape(-1)])
    expected = dequantize(blocks.reshape(-1), "Q4_1")
    assert np.array_equal(dequantize(whole[32:], "Q4_1"), expected)


def test_f32_shares_memory_and_others_do_not_change_their_input() -> None:
    data = np.arange(32, dtype=np.uint8)
    assert np.shares_memory(dequantize(data, "F32"), data)
    for name in ("F16", "BF16"):
        dequantize(data, name).fill(0)
    assert np.array_equal(data, np.arange(32))


def test_wrong_types_and_sizes() -> None:
    with pytest.raises(KeyError, match="Q8_K"):
        dequantize(np.zeros(292, np.uint8), "Q8_K")
    with pytest.raises(ValueError, match="reshape"):
        dequantize(np.zeros(19, np.uint8), "Q4_1")
