"""Dequantization, bit for bit against the gguf package."""

import gguf
import numpy as np
import pytest
import torch

from kernels.cpu.build import usable_variants
from kernels.cpu.dequantize import cpu_dequantize, has_cpu_kernel
from kernels.cpu.library import load_cpu_library
from kernels.torch.dequantize import BLOCK_SIZES, dequantize


def random_blocks(type_name: str, count: int, seed: int) -> np.ndarray:
    """uint8[count, bytes of a block], with finite scales of all magnitudes."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, BLOCK_SIZES[type_name][1]), dtype=np.uint8)
    if type_name.startswith("Q"):
        # float16 of exponents 0 (subnormal) to 30, either sign
        scales = (
            rng.integers(0, 0x7C00, (count, 2)).astype(np.uint16)
            | rng.integers(0, 2, (count, 2)).astype(np.uint16) << 15
        )
        begin = 208 if type_name == "Q6_K" else 0
        width = 4 if type_name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2
        blocks[:, begin : begin + width] = scales.view(np.uint8).reshape(count, 4)[:, :width]
    return blocks


@pytest.mark.parametrize("type_name", BLOCK_SIZES)
@pytest.mark.parametrize("count", [1, 3, 64, 5000])
def test_bits_equal_those_of_the_gguf_package(type_name: str, count: int) -> None:
    blocks = random_blocks(type_name, count, seed=count)
    kind = gguf.GGMLQuantizationType[type_name]
    with np.errstate(invalid="ignore"):  # F16 and F32 of random bits hold signalling NaNs
        expected = gguf.dequantize(blocks, kind).reshape(-1)
    found = dequantize(torch.from_numpy(blocks).view(-1), type_name)
    assert found.dtype == torch.float32
    assert found.shape == (count * BLOCK_SIZES[type_name][0],)
    numbers = ~np.isnan(expected)
    assert numbers.sum() > 0.9 * numbers.size
    assert np.array_equal(found.numpy().view(np.uint32)[numbers], expected.view(np.uint32)[numbers])
    assert np.array_equal(np.isnan(found.numpy()), ~numbers)


@pytest.mark.parametrize("variant", usable_variants())
@pytest.mark.parametrize("type_name", [name for name in BLOCK_SIZES if name.startswith("Q")])
def test_the_c_kernel_gives_the_same_bits(type_name: str, variant: str) -> None:
    library = load_cpu_library(variant)
    blocks = torch.from_numpy(random_blocks(type_name, 1003, seed=1)).view(-1)
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        assert has_cpu_kernel(type_name, dtype)
        expected = dequantize(blocks, type_name).to(dtype)
        assert expected.isfinite().all()
        found = cpu_dequantize(library, blocks, type_name, dtype)
        assert torch.equal(found.view(bits), expected.view(bits))
    with pytest.raises(RuntimeError, match="shape"):
        cpu_dequantize(library, blocks[1:], type_name, torch.float32)


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for name, sizes in BLOCK_SIZES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == sizes


def test_known_answers() -> None:
    half = np.array([0.5, -2.0], np.float16).tobytes()
    low_high = bytes([0x0F, 0xF0, *range(2, 16)])
    q4_1 = dequantize(torch.frombuffer(bytearray(half + low_high), dtype=torch.uint8), "Q4_1")
    assert q4_1[[0, 1, 2, 16, 17, 18]].tolist() == [5.5, -2.0, -1.0, -2.0, 5.5, -2.0]
    q4_0 = dequantize(torch.frombuffer(bytearray(half[:2] + low_high), dtype=torch.uint8), "Q4_0")
    assert q4_0[[0, 1, 2, 16, 17, 18]].tolist() == [3.5, -4.0, -3.0, -4.0, 3.5, -4.0]
    q8_0 = dequantize(
        torch.frombuffer(bytearray(half[:2] + bytes([255, 128, 127] + [0] * 29)), dtype=torch.uint8), "Q8_0"
    )
    assert q8_0[:4].tolist() == [-0.5, -64.0, 63.5, 0.0]


def test_a_slice_of_a_larger_buffer() -> None:
    blocks = random_blocks("Q4_1", 10, seed=0)
    whole = torch.from_numpy(np.concatenate([np.zeros(32, np.uint8), blocks.reshape(-1)]))
    expected = dequantize(torch.from_numpy(blocks).view(-1), "Q4_1")
    assert torch.equal(dequantize(whole[32:], "Q4_1"), expected)


def test_f32_shares_memory_and_others_do_not_change_their_input() -> None:
    data = torch.arange(32, dtype=torch.uint8)
    assert dequantize(data, "F32").data_ptr() == data.data_ptr()
    for name in ("F16", "BF16"):
        dequantize(data, name).zero_()
    assert torch.equal(data, torch.arange(32, dtype=torch.uint8))


def test_wrong_types_and_sizes() -> None:
    with pytest.raises(KeyError, match="Q2_K"):
        dequantize(torch.zeros(84, dtype=torch.uint8), "Q2_K")
    with pytest.raises(RuntimeError, match="shape"):
        dequantize(torch.zeros(19, dtype=torch.uint8), "Q4_1")
