"""Files that have one scale for a product's inputs in FP8: who reads it, what it changes, and level L2 with it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.model_files.loading import load_model
from core.models.config import ModelConfig
from core.models.llama import Llama
from core.models.operations.stored_matrix import StoredMatrix, Weight
from core.models.operations.triton_operations import TritonOperations
from core.models.operations.weight_form import WeightForm
from ipc.errors import ModelFileError
from ipc.options.config import EngineConfig
from kernels.elements import BFLOAT16, FLOAT32
from kernels.triton.fp8.fp8_linear import Fp8Linear
from kernels.triton.fp8.fp8_product import fp8_product, quantized
from tests.core.executors.test_cuda_architectures import OnDevice, built, logits, shape_config
from tests.core.executors.test_cuda_invariance import differing, use_splits
from tests.core.model_files.test_packed_matrices import quantized_folder
from tests.core.models.test_llama import random_weights
from tests.kernels.triton.test_fp8 import defined
from tests.triton_device import ANYWHERE, DEVICE, ON_GPU
from tools.lab.bench.tiny_model import write_tiny_model

pytestmark = ANYWHERE

STATIC: dict[str, dict[str, Any]] = {
    "input_scale": {"quant_method": "fp8", "activation_scheme": "static"},
    "activation_scale": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "float-quantized"},
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    write_tiny_model(folder)
    return folder


def static_folder(source: Path, folder: Path, form: str = "input_scale", scale: float = 0.02) -> Path:
    """The tiny model in FP8, with scales for inputs: K's is twice the others'."""
    folder.mkdir()
    quantized_folder(source, folder, "fp8", plain=False)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": STATIC[form]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors, own = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    kind = form if form == "activation_scale" else "input_scale"
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last != "weight_scale_inv":
            own[name] = tensor
            continue
        given = scale * (2 if stem.endswith("k_proj") else 1)
        own[name if form == "activation_scale" else f"{stem}.weight_scale"] = tensor
        own[f"{stem}.{kind}"] = torch.tensor(given) if form == "modelopt" else torch.tensor([given]).bfloat16()
    save_file(own, folder / "model.safetensors")
    return folder


def loaded(folder: Path, quantization: Any = "fp8", device: Any = "cuda") -> Llama:
    config = EngineConfig(model=str(folder), device=device, quantization=quantization, threads=1)
    one = load_model(folder, BFLOAT16, config).model
    assert isinstance(one, Llama)
    return one


@pytest.mark.parametrize("form", STATIC)
def test_products_have_the_files_scales(form: str, source: Path, tmp_path: Path) -> None:
    """Q, K and V are one product, whose inputs have the largest of their scales."""
    one = loaded(static_folder(source, tmp_path / "model", form))
    scale = 0.02 if form == "modelopt" else float(torch.tensor(0.02).bfloat16())
    scales = {name: product.input_scale for name, product in one.layers[0].products.items()}
    assert scales == pytest.approx({"qkv": 2 * scale, "o": scale, "gate_up": scale, "down": scale}, rel=1e-6)
    assert "down=triton-fp8.1-block.128-given" in one.variant
    other = loaded(static_folder(source, tmp_path / "other", form, 0.03))
    assert one.variant.partition(" inputs=")[0] == other.variant.partition(" inputs=")[0]
    assert one.variant != other.variant, "the fingerprint does not say the scales"


def test_without_products_in_fp8_scales_are_not_read(source: Path, tmp_path: Path) -> None:
    """Not even one that would be refused."""
    folder = static_folder(source, tmp_path / "model", scale=-1.0)
    stored = loaded(folder, "stored")
    assert " inputs=" not in stored.variant
    assert loaded(folder, "auto", "cpu").variant
    with pytest.raises(ModelFileError, match=r"q_proj\.input_scale is -1\.0; a scale is a positive number"):
        loaded(folder)


def with_scales(config: ModelConfig, scale: float, dtype: Any) -> Iterator[tuple[str, Weight]]:
    for name, weight in random_weights(config, dtype):
        if weight.ndim < 2:
            yield name, weight
            continue
        parts = [part._replace(input_scale=lambda: scale) for part in StoredMatrix.of(weight).parts]
        yield name, StoredMatrix(parts)


def model(scale: float, dtype: Any) -> OnDevice:
    config = msgspec.structs.replace(shape_config("llama"), num_hidden_layers=1)
    operations = TritonOperations(config, dtype, DEVICE, WeightForm.FP8)
    return OnDevice(built(config, dict(with_scales(config, scale, dtype)), dtype, operations))


def test_no_bit_differs_in_pieces_and_in_company(monkeypatch: pytest.MonkeyPatch) -> None:
    use_splits(64, monkeypatch)
    assert differing(model(0.01, BFLOAT16), 64) == 0


def test_the_scale_is_what_inputs_are_divided_by() -> None:
    """One that fits gives nearly the logits of scales as they come; one of a thousandth cuts all inputs."""
    fitting, cut = (logits(model(scale, FLOAT32)).flatten() for scale in (0.01, 1e-5))
    config = msgspec.structs.replace(shape_config("llama"), num_hidden_layers=1)
    operations = TritonOperations(config, FLOAT32, DEVICE, WeightForm.FP8)
    plain = OnDevice(built(config, dict(random_weights(config, FLOAT32)), FLOAT32, operations))
    usual = logits(plain).flatten()
    assert torch.corrcoef(torch.stack((fitting, usual)))[0, 1] > 0.99
    assert torch.corrcoef(torch.stack((cut, usual)))[0, 1] < 0.99


def test_the_part_of_a_matrix_without_a_scale_leaves_it_to_the_inputs() -> None:
    weight = StoredMatrix.of(torch.ones(4, 64).numpy())
    scaled = StoredMatrix([weight.parts[0]._replace(input_scale=lambda: 0.5), *weight.parts])
    operations = TritonOperations(shape_config("llama"), FLOAT32, DEVICE, WeightForm.FP8)
    product = operations.linear(scaled)
    assert isinstance(product, Fp8Linear)
    assert product.input_scale is None
    assert " inputs=" not in operations.variant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_divided_rounded_and_cut(dtype: torch.dtype) -> None:
    x = (torch.randn(35, 200, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    x[3, 7], x[4, 8] = float("nan"), float("-inf")
    scale, there = 0.011, x.isfinite()
    found = quantized(x.to(DEVICE), scale)
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    numbers = found.numbers.cpu()
    assert (found.scales == torch.tensor(scale)).all()
    assert torch.equal(numbers[there], (codes * torch.tensor(scale))[there])
    assert numbers[~there].isnan().all()
    assert numbers[there].abs().max() == 448 * torch.tensor(scale), "nothing was cut"
    x[~there] = 0.5
    weight, out = quantized(torch.randn(70, 200).to(DEVICE)), torch.empty(35, 70, device=DEVICE)
    product = fp8_product(x.to(DEVICE), weight, None, out, scale=scale)
    assert torch.equal(fp8_product(x[5:6].to(DEVICE), weight, None, out[:1].clone(), scale=scale), product[5:6])
    if not ON_GPU:  # on a GPU the core may be another
        assert np.array_equal(product.numpy(), defined(quantized(x, scale), weight))
