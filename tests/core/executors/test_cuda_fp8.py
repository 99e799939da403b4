"""Whole models with weights and activations in FP8 on a GPU: level L2, ranks, experts, adapters' places, refusals."""

from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch

from core.model_files.loading import load_model
from core.models import device_model as device_models
from core.models.device_model import device_model
from core.models.llama import Llama
from core.models.operations.weight_form import WeightForm
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from kernels.elements import BFLOAT16, FLOAT32
from kernels.triton.fp8.fp8_linear import Fp8Linear
from kernels.triton.linear import DeviceLinear
from kernels.triton.routed.expert_products import StackedProduct
from kernels.triton.routed.packed_experts import PackedStack
from tests.core.executors.test_cuda_architectures import OnDevice, logits, shape_config
from tests.core.executors.test_cuda_invariance import differing, model, use_splits
from tests.core.model_files.test_packed_matrices import quantized_folder
from tests.core.models.test_llama import random_weights, tiny_config
from tests.triton_device import ANYWHERE, DEVICE
from tools.lab.bench.tiny_model import write_tiny_model

pytestmark = ANYWHERE


@pytest.mark.parametrize(("kind", "dtype", "split"), [("llama", BFLOAT16, 64), ("mixtral", FLOAT32, 32)])
def test_no_bit_differs_in_pieces_and_in_company(
    kind: str, dtype: Any, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_splits(split, monkeypatch)
    assert differing(model(kind, dtype, num_layers=1, form=WeightForm.FP8), split) == 0


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt-oss", "mixtral", "qwen3-next", "deepseek-v2-lite"])
def test_no_bit_differs_for_any_architecture(kind: str, dtype: Any) -> None:
    assert differing(model(kind, dtype, form=WeightForm.FP8)) == 0


def test_logits_are_near_those_of_the_model() -> None:
    """And others: else all above would say nothing of the form."""
    found, expected = (
        logits(model("llama", FLOAT32, form=form)).flatten() for form in (WeightForm.FP8, WeightForm.DENSE)
    )
    assert not torch.equal(found, expected)
    assert torch.corrcoef(torch.stack((found, expected)))[0, 1] > 0.99


def kinds(llama: Llama) -> dict[str, type]:
    return {name: type(one) for name, one in {**llama.layers[0].products, "head": llama.head}.items()}


def test_the_fingerprint_names_it_and_the_head_is_left() -> None:
    config = tiny_config(num_hidden_layers=1, vocab_size=64)
    one = device_model(config, random_weights(config, FLOAT32), FLOAT32, DEVICE, WeightForm.FP8)
    assert kinds(one) == {**dict.fromkeys(("qkv", "o", "gate_up", "down"), Fp8Linear), "head": DeviceLinear}
    assert one.numerics == "L2"
    assert one.product_variants["gate_up"] == "triton-fp8.1-block.128"
    assert "o=triton-fp8.1-block.128" in one.variant


def test_experts_have_their_weights_alone_in_8_bits() -> None:
    for intermediate, kind in ((64, PackedStack), (40, StackedProduct)):
        config = shape_config("mixtral")
        assert config.experts is not None
        parts = type(config.experts)(num_experts=4, num_chosen=2, intermediate_size=intermediate, normalises=True)
        config = tiny_config(num_hidden_layers=1, vocab_size=64, experts=parts)
        weights = dict(random_weights(config, FLOAT32))
        one = device_model(config, weights.items(), FLOAT32, DEVICE, WeightForm.FP8)
        experts = cast(Any, one.layers[0].mlp).experts
        assert isinstance(experts.down, kind)
        assert logits(OnDevice(one)).isfinite().all()


@pytest.mark.parametrize("packing", ["fp8", "none"])
def test_the_option_reaches_the_operations(packing: str, tmp_path: Path) -> None:
    """A file's codes stay as they are; other matrices are quantized."""
    folder, source = tmp_path / "model", tmp_path / "source"
    write_tiny_model(source)
    if packing == "fp8":
        folder.mkdir()
        quantized_folder(source, folder, "fp8", plain=False)
    else:
        write_tiny_model(folder)

    def loaded(quantization: Literal["fp8", "stored"]) -> Llama:
        config = EngineConfig(model=str(folder), device="cuda", quantization=quantization)
        one = load_model(folder, BFLOAT16, config).model
        assert isinstance(one, Llama)
        return one

    one = loaded("fp8")
    assert kinds(one) == {**dict.fromkeys(("qkv", "o", "gate_up", "down"), Fp8Linear), "head": DeviceLinear}
    if packing == "fp8":
        packed = loaded("stored").layers[0].products["down"].parts
        codes = one.layers[0].products["down"].weight.codes
        assert torch.equal(torch.cat([part.codes for part in packed]), codes[:, : packed[0].depth])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"device": "cpu"}, "use 'int8' on a CPU"), ({"device": "cuda", "numerics": "L0"}, "numerics level L2")],
)
def test_what_has_no_products_in_fp8_refuses_the_option(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = EngineConfig(model=str(tmp_path), quantization="fp8", **options)
    with pytest.raises(ConfigError, match=f"^quantization='fp8' needs device='cuda' at .*{message}"):
        load_model(tmp_path, BFLOAT16, config)


def test_a_device_without_them_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(num_hidden_layers=1, vocab_size=64)

    def build() -> None:
        device_model(config, random_weights(config, FLOAT32), FLOAT32, DEVICE, WeightForm.FP8)

    monkeypatch.setattr(device_models, "fp8_products_are_ordered", lambda *_: False)
    with pytest.raises(ConfigError, match="needs numerics level L2, which this device lacks"):
        build()
    monkeypatch.setattr(device_models, "has_fp8", lambda *_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"needs compute capability 8\.9 or newer, and NVIDIA A100 is older"):
        build()
