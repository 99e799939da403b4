"""Weights from safetensors folders and GGUF files, against transformers and against files with one thing wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from core.model_files.model_config import ModelConfig, read_model_config
from core.model_files.tensors import weights
from core.model_files.tensors.weight_shapes import expected_shapes
from core.model_files.tensors.weights import load_weights
from core.models.operations.stored_matrix import Weight
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.gguf import read_gguf
from ipc.files.model_files import resolve_model
from kernels.elements import FLOAT32, Dtype
from kernels.torch.tensors import element_type
from tests.numbers import dense_tensor

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=40,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(),
    dtype="float32",
)
TIED = ModelConfig(
    **{**{name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__}, "tie_word_embeddings": True}
)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Hundreds of small parallel regions wait for one another when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_weights(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in expected_shapes(config).items()}


def llama_cpp_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The order into which llama.cpp's converter brings the rows of q and k: halves of a head interleaved."""
    halves = weight.view(heads, 2, -1, weight.shape[1])
    return torch.stack([halves[:, 0], halves[:, 1]], dim=2).reshape(weight.shape)


def to_gguf(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names and row order of a GGUF file."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG.num_hidden_layers)
    out = {}
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            heads = CONFIG.num_attention_heads if "q_proj" in name else CONFIG.num_key_value_heads
            tensor = llama_cpp_rows(tensor, heads)
        out[names.get_name(name, try_suffixes=(".weight",)) or name] = tensor
    return out


def write_gguf(path: Path, tensors: dict[str, torch.Tensor], kind: str = "F32") -> Path:
    """Matrices in `kind`, vectors in F32, as llama.cpp has them."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, tensor in tensors.items():
        stored = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 else "F32"]
        data = tensor.double().numpy() if stored.name == "F64" else gguf.quantize(tensor.numpy(), stored)
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dense_weights(weights: Iterator[tuple[str, Weight]], dtype: Dtype = FLOAT32) -> dict[str, torch.Tensor]:
    return {name: dense_tensor(weight, dtype) for name, weight in weights}


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert list(found) == list(expected)
    for name, tensor in found.items():
        kind = dtype if tensor.dim() > 1 else torch.float32  # of norms and biases
        assert tensor.dtype == kind, name
        assert torch.equal(tensor, expected[name].to(kind)), name


# --- against transformers -----------------------------------------------------------------------------------------


def copy_without_vocabulary(source: Path, path: Path, num_layers: int) -> Path:
    """The same settings, and the tensors of the first layers and of none. The gguf package and transformers take ten
    seconds to read a vocabulary."""
    header = read_gguf(source)
    data = np.memmap(source, np.uint8, "r")
    kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    writer = gguf.GGUFWriter(path, str(header.metadata["general.architecture"]))
    for key, value in header.metadata.items():
        if type(value) in kinds:
            writer.add_key_value(key, value, kinds[type(value)])
    writer.add_name("no name")
    for tensor in header.tensors.values():
        if tensor.name.startswith("blk.") and int(tensor.name.split(".")[1]) >= num_layers:
            continue
        raw = data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(tensor.name, raw, raw_dtype=gguf.GGMLQuantizationType[tensor.type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("num_layers", "count"), [(3, 38_932_416), pytest.param(30, 134_515_008, marks=pytest.mark.soak)]
)
def test_demo_model_equals_transformers_reading_of_it(
    num_layers: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the first layers, and of all 30, in float32. from_pretrained(gguf_file=...) refuses to run without
    accelerate; the converter behind it does not need it."""
    from transformers import LlamaConfig, LlamaForCausalLM, modeling_gguf_pytorch_utils

    monkeypatch.setattr(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **_: tensors)
    path = resolve_model(None)
    config = read_model_config(path)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers, tie_word_embeddings=True))
    copy = copy_without_vocabulary(path, tmp_path / "copy.gguf", num_layers)
    load_gguf_checkpoint: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    oracle = load_gguf_checkpoint(str(copy), return_tensors=True, model_to_load=model)
    for name in ("hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings"):
        assert getattr(config, name) == oracle["config"][name], name
    expected = oracle["tensors"]
    num_weights = 0
    for name, weight in load_weights(path, config, FLOAT32):
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= num_layers:
            continue
        tensor = dense_tensor(weight)
        assert torch.equal(tensor, expected.pop(name)), name
        num_weights += tensor.numel()
    copy.unlink()
    assert not expected
    assert num_weights == count


def test_folder_saved_by_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    for tied in (True, False):
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        settings = {name: getattr(CONFIG, name) for name in (*names, "num_key_value_heads")}
        model = LlamaForCausalLM(LlamaConfig(**settings, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=3))
        model.save_pretrained(tmp_path)
        config = read_model_config(tmp_path)
        found = dense_weights(load_weights(tmp_path, config, FLOAT32))
        expected = {name: tensor for name, tensor in model.state_dict().items() if not tied or name != "lm_head.weight"}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


# --- conversions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_folder_in_every_dtype(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    tensors = random_weights(dtype=stored)
    save_file(tensors, tmp_path / "model.safetensors")
    check_equal(
        dense_weights(load_weights(tmp_path, CONFIG, element_type(wanted)), element_type(wanted)), tensors, wanted
    )


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_in_every_type(kind: str, tmp_path: Path) -> None:
    tensors = random_weights()
    path = write_gguf(tmp_path / "m.gguf", to_gguf(tensors), kind)
    stored = gguf.GGMLQuantizationType[kind]
    expected = {
        name: tensor
        if tensor.dim() == 1
        else torch.from_numpy(
            gguf.dequantize(gguf.quantize(tensor.numpy(), stored), stored).reshape(tensor.shape).copy()
        )
        for name, tensor in tensors.items()
    }
    for dtype in (torch.float32, torch.bfloat16):
        check_equal(
            dense_weights(load_weights(path, CONFIG, element_type(dtype)), element_type(dtype)), expected, dtype
        )


def test_files_under_an_index(tmp_path: Path) -> None:
    tensors = random_weights()
    names = list(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_equal(dense_weights(load_weights(tmp_path, CONFIG, FLOAT32)), tensors, torch.float32)


@pytest.mark.parametrize("padding", range(1, 8))
def test_safetensors_data_at_odd_bytes(padding: int, tmp_path: Path) -> None:
    """The format lets a header have any length; the package pads it to 8 bytes."""
    tensors = random_weights(dtype=torch.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length] + b" " * padding
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    for dtype in (torch.float32, torch.float16):
        check_equal(
            dense_weights(load_weights(tmp_path, CONFIG, element_type(dtype)), element_type(dtype)), tensors, dtype
        )


def test_weights_that_need_no_conversion_are_not_copied(tmp_path: Path) -> None:
    tensors = random_weights()
    save_file(tensors, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    found = dense_weights(load_weights(tmp_path, CONFIG, FLOAT32))
    places = [tensor.data_ptr() for tensor in found.values()]
    assert max(places) - min(places) < len(before)  # all lie in one mapping
    found["model.norm.weight"].zero_()  # the mapping is private
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_weights_outlive_the_iterator_and_the_file(tmp_path: Path) -> None:
    tensors = random_weights()
    save_file(tensors, tmp_path / "model.safetensors")
    name, weight = next(load_weights(tmp_path, CONFIG, FLOAT32))
    tensor = dense_tensor(weight)
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(tensor, tensors[name])


def test_harmless_extra_tensors(tmp_path: Path) -> None:
    tensors = random_weights(TIED)
    extra = {
        "lm_head.weight": torch.zeros(40, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "model.rotary_emb.inv_freq": torch.zeros(8),
    }
    save_file(tensors | extra, tmp_path / "model.safetensors")
    check_equal(dense_weights(load_weights(tmp_path, TIED, FLOAT32)), tensors, torch.float32)
    path = write_gguf(tmp_path / "m.gguf", to_gguf(tensors) | {"blk.0.attn_rot_embd.weight": torch.zeros(8)})
    check_equal(dense_weights(load_weights(path, TIED, FLOAT32)), tensors, torch.float32)


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal comes before anything is mapped or made."""

    def fail(*args: object) -> None:
        raise AssertionError("a weight was converted before all were checked")

    monkeypatch.setattr(weights, "_convert", fail)


@pytest.mark.usefixtures("no_conversion")
def test_missing_unexpected_and_misshapen_tensors_of_a_folder(tmp_path: Path) -> None:
    tensors = random_weights()
    file = tmp_path / "model.safetensors"
    transposed = tensors["model.layers.0.mlp.up_proj.weight"].T.contiguous()
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        (
            {name: t for name, t in tensors.items() if name != Q_PROJ},
            rf"{Q_PROJ} is missing; expected shape \(64, 64\)",
        ),
        (
            tensors | {"model.layers.0.mlp.up_proj.weight": transposed},
            r"has shape \(64, 96\); the config says \(96, 64\)",
        ),
        (tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, "unexpected tensor .*q_proj.bias"),
        (tensors | {"model.layers.2.mlp.up_proj.weight": transposed}, "unexpected tensor 'model.layers.2"),
        (
            tensors | {"model.norm.weight": torch.zeros(64, dtype=torch.int8)},
            "model.norm.weight has type I8; supported",
        ),
        (tensors | {"model.norm.weight": torch.zeros(64, dtype=torch.float64)}, "model.norm.weight has type F64; supp"),
    ]
    for contents, message in cases:
        save_file(contents, file)
        with pytest.raises(ModelFileError, match=message) as caught:
            load_weights(tmp_path, CONFIG, FLOAT32)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.usefixtures("no_conversion")
def test_missing_unexpected_and_misshapen_tensors_of_a_gguf_file(tmp_path: Path) -> None:
    tensors = to_gguf(random_weights())
    path = tmp_path / "m.gguf"
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({name: t for name, t in tensors.items() if name != "blk.1.attn_k.weight"}, "blk.1.attn_k.weight is missing"),
        (tensors | {"blk.1.attn_k.weight": torch.zeros(64, 64)}, r"shape \(64, 64\); the config says \(32, 64\)"),
        (tensors | {"blk.1.attn_q.bias": torch.zeros(64)}, "unexpected tensor 'blk.1.attn_q.bias'"),
        (tensors | {"blk.1.attn_q_norm.weight": torch.zeros(16)}, "unexpected tensor 'blk.1.attn_q_norm.weight'"),
    ]
    for contents, message in cases:
        write_gguf(path, contents)
        with pytest.raises(ModelFileError, match=message) as caught:
            load_weights(path, CONFIG, FLOAT32)
        assert str(path) in str(caught.value)
    with pytest.raises(ModelFileError, match=r"unexpected tensor 'output\.weight'"):
        load_weights(write_gguf(path, tensors), TIED, FLOAT32)


@pytest.mark.usefixtures("no_conversion")
def test_a_quantization_that_is_not_supported(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", to_gguf(random_weights()), "F64")
    with pytest.raises(
        UnsupportedModelError, match=r"token_embd\.weight has type F64; supported are F32, F16, BF16, Q8_0"
    ):
        load_weights(path, CONFIG, FLOAT32)


def test_a_config_of_absurd_size_costs_nothing_to_refuse(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    huge = {"vocab_size": 2**24, "hidden_size": 2**20, "num_hidden_layers": 2**12, "intermediate_size": 2**22}
    config = ModelConfig(**{**{name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__}, **huge})
    with pytest.raises(ModelFileError, match=r"model\.embed_tokens\.weight is missing"):
        load_weights(tmp_path, config, FLOAT32)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    save_file(random_weights(), tmp_path / "model.safetensors")
    found = load_weights(tmp_path, CONFIG, FLOAT32)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:4096])
    with pytest.raises(ModelFileError, match="became shorter"):
        dict(found)


def test_q_and_k_rows_by_hand(tmp_path: Path) -> None:
    """llama.cpp rotates rows 2i and 2i+1 of a head together; here rows i and i + head_dim/2 are rotated."""
    tensors = random_weights()
    rows = torch.arange(64, dtype=torch.float32)[:, None].expand(64, 64).contiguous()
    contents = to_gguf(tensors) | {"blk.1.attn_q.weight": rows}
    path = write_gguf(tmp_path / "m.gguf", contents)
    found = dense_weights(load_weights(path, CONFIG, FLOAT32))[Q_PROJ]
    head = [*range(0, 16, 2), *range(1, 16, 2)]
    assert found[:, 0].tolist() == [16 * h + row for h in range(4) for row in head]
    assert np.array_equal(found[:, 0], found[:, 63])
