"""gpt-oss with experts in MXFP4 from both kinds of files, as transformers dequantizes it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.model_files.model_config import read_model_config
from core.model_files.tensors.weights import load_weights
from core.models.llama import Llama
from core.models.operations.stored_matrix import StoredMatrix
from core.models.operations.weight_form import WeightForm
from ipc.errors import ModelFileError
from ipc.tables.arrays import UInt8s
from kernels.cpu.library import load_cpu_library
from kernels.cpu.packed_weights import QUANTIZED
from kernels.elements import BFLOAT16, FLOAT32
from tests.core.models.checkpoints import Golden, build, check_greedy, check_logits, golden_of
from tests.core.models.gguf_checkpoints import converted, metadata
from tests.core.models.test_llama import Requests

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_rows(rows: int, blocks: int, low: int, high: int) -> UInt8s:
    """uint8 [rows, blocks, 17] with exponents from low to before high."""
    rng = np.random.default_rng(low)
    return np.concatenate(
        (rng.integers(low, high, (rows, blocks, 1), np.uint8), rng.integers(0, 256, (rows, blocks, 16), np.uint8)), 2
    )


def packed_golden() -> tuple[Golden, dict[str, torch.Tensor]]:
    """A model whose experts' weights are MXFP4; and its blocks and scales as gpt-oss's folders have them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors: dict[str, torch.Tensor] = {}

    model = build("gpt-oss", hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, depth, columns = parameter.shape
        blocks = random_rows(experts * columns, depth // 32, 122, 125).reshape(experts, columns, -1, 17)
        scales, codes = (torch.from_numpy(part.copy()) for part in (blocks[..., 0], blocks[..., 1:]))
        tensors[f"{name}_scales"], tensors[f"{name}_blocks"] = scales, codes
        with torch.no_grad():
            parameter.copy_(convert_moe_packed_tensors(codes, scales, dtype=torch.float32))
    return golden_of(model), tensors


def write_folder(folder: Path, expected: Golden, packed: dict[str, torch.Tensor]) -> Path:
    expected.model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    save_file(kept | packed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


def write_gguf(path: Path, expected: Golden, packed: dict[str, torch.Tensor]) -> Path:
    """The experts' rows as llama.cpp's converter writes them: bytes of weights that are 16 apart."""
    writer = gguf.GGUFWriter(path, "gpt-oss")
    metadata(writer, expected.model.config)
    for name, tensor in converted(expected.model, "gpt-oss").items():
        if "_exps.weight" not in name:
            writer.add_tensor(name, tensor.numpy())
    for name, codes in packed.items():
        if not name.endswith("_blocks"):
            continue
        scales = packed[name.replace("_blocks", "_scales")].numpy()
        nibbles = np.stack((codes.numpy() & 15, codes.numpy() >> 4), -1).reshape(*codes.shape[:3], 32)
        rows = np.concatenate((scales[..., None], nibbles[..., :16] | nibbles[..., 16:] << 4), -1)
        rows = rows.reshape(*rows.shape[:2], -1)
        parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if "gate_up" in name else {"down": rows}
        for part, data in parts.items():
            writer.add_tensor(
                f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight",
                np.ascontiguousarray(data),
                raw_dtype=gguf.GGMLQuantizationType.MXFP4,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gpt_oss_in_mxfp4_gives_what_transformers_gives(tmp_path: Path) -> None:
    expected, packed = packed_golden()
    folder = write_folder(tmp_path / "folder", expected, packed)
    file = write_gguf(tmp_path / "model.gguf", expected, packed)
    check_logits(folder, expected)
    check_greedy(folder, expected)
    config = read_model_config(file)
    joined: dict[str, Any] = {}
    for name, weight in load_weights(file, config, FLOAT32):
        numbers = weight.dense(FLOAT32) if isinstance(weight, StoredMatrix) else weight
        half = "gate_proj" in name or "up_proj" in name
        ours = name.replace("up_proj" if "up_proj" in name else "gate_proj", "gate_up_proj") if half else name
        joined[ours] = np.concatenate((joined[ours], numbers)) if ours in joined else numbers
    for name, weight in load_weights(folder, read_model_config(folder), FLOAT32):
        numbers = weight.dense(FLOAT32) if isinstance(weight, StoredMatrix) else weight
        assert np.array_equal(joined.pop(name), numbers), name
    assert not joined
    check_logits(file, expected)


def test_stored_experts_give_the_bits_of_dequantized_ones(tmp_path: Path) -> None:
    expected, packed = packed_golden()
    folder = write_folder(tmp_path, expected, packed)
    config = read_model_config(folder)
    results = []
    for form in (WeightForm.STORED, WeightForm.DENSE):
        weights = load_weights(folder, config, BFLOAT16)
        model = Llama(config, weights, BFLOAT16, library=load_cpu_library(), form=form)
        experts: Any = model.layers[0].products["experts"]
        assert {each.packing == QUANTIZED for each in experts.matrices} == {form is WeightForm.STORED}
        results.append(Requests(model, expected.prompts[1:2]).step({0: len(expected.prompts[1])})[0])
    assert torch.equal(*results)


def test_blocks_of_another_shape_are_refused(tmp_path: Path) -> None:
    expected, packed = packed_golden()
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    folder = write_folder(tmp_path, expected, packed | {name: packed[name][:, :, :, :8].contiguous()})
    with pytest.raises(ModelFileError, match=r"experts.0.down_proj: blocks has shape \(64, 3, 8\)"):
        load_weights(folder, read_model_config(folder), FLOAT32)
