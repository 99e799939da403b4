"""The rows of packed products in `bench kernels --device cuda`: what is called, and what is told of it."""

import torch

from tests.triton_device import ANYWHERE, DEVICE
from tools.lab.bench.gpu.gpu_kernels import LLAMA_8B, ROWS, quantized_products

pytestmark = ANYWHERE


def test_each_form_and_number_of_rows_is_beside_torchs_product() -> None:
    cases = list(quantized_products({"wide": (96, 64), "deep": (32, 256)}, DEVICE, torch.float32))
    forms = ["ordered", "int8", "Q4_0", "fp8", "ordered", "int8", "Q4_0", "Q4_K", "fp8"]
    assert [case.kernel for case in cases] == [f"product {form}" for form in forms for _ in ROWS]
    case = cases[len(ROWS) + 1]
    assert (case.shape, case.theirs) == ("wide 8x64x96", "linear")
    assert case.num_bytes == 96 * 64 * 8.5 / 8 + 8 * (64 + 96) * 4
    assert case.num_flops == 2 * 8 * 64 * 96
    ours, theirs = case.run(), case.torch_run()
    assert isinstance(ours, torch.Tensor)
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02)
    assert all(isinstance(case.run(), torch.Tensor) for case in cases)


def test_the_shapes_are_those_of_llama_3_8b() -> None:
    expected = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336)}
    assert LLAMA_8B.products == expected


def test_the_product_of_gate_and_up_ends_with_the_activation() -> None:
    cases = list(quantized_products({"gate_up": (96, 64)}, DEVICE, torch.float32))[-len(ROWS) :]
    assert {case.kernel for case in cases} == {"product gated"}
    assert cases[1].num_bytes == 96 * 64 * 4 + 8 * (64 + 48) * 4
    torch.testing.assert_close(cases[1].run(), cases[1].torch_run(), rtol=1e-4, atol=1e-5)
