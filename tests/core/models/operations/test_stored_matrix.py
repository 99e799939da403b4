"""Stored matrices: parts of several types below one another, converted when an operation asks, to the bits that each
part alone gives."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from core.model_files.model_config import ModelConfig
from core.model_files.tensors.weight_shapes import expected_shapes
from core.model_files.tensors.weights import load_weights
from core.models.llama import Llama
from core.models.operations import stored_matrix
from core.models.operations.stored_matrix import StoredMatrix, StoredPart
from core.models.operations.weight_form import WeightForm
from core.models.parts.weight_parts import WeightParts
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.dequantize import BLOCK_SIZES, FILE_TYPES, PLAIN_TYPES, dequantize
from kernels.elements import BFLOAT16, FLOAT32, Dtype, rounded
from tests.core.models.test_llama import Requests, prompts
from tests.kernels.block_scales import TYPES as BLOCK_TYPES
from tests.kernels.block_scales import set_scales
from tests.numbers import dense

DTYPES = [FLOAT32, BFLOAT16]
DEPTH = 512
#: Rows of each type.
MIXED = {"Q4_K": 3, "Q6_K": 2, "F32": 1, "BF16": 4, "Q8_0": 5, "F16": 2, "Q5_1": 1, "IQ4_XS": 3, "IQ1_M": 1, "NVFP4": 2}
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=40,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(),
    dtype="float32",
)
#: As llama.cpp mixes types of one layer, and a little more.
TYPES = {
    "attn_q": "Q8_0",
    "attn_k": "Q5_0",
    "attn_v": "F16",
    "ffn_gate": "BF16",
    "ffn_up": "Q4_1",
    "token_embd": "Q8_0",
}


def stored(type_name: str, rows: int, **options: Any) -> StoredPart:
    weights, block_bytes = BLOCK_SIZES[type_name]
    numbers = np.random.default_rng(rows).standard_normal((rows, DEPTH), np.float32)
    if weights == 1:
        data = rounded(numbers, PLAIN_TYPES[type_name]).view(np.uint8)
    else:
        shape = rows, DEPTH // weights, block_bytes
        blocks = np.random.default_rng(rows).integers(0, 256, shape, np.uint8)
        set_scales(blocks, type_name, 0.01)
        data = blocks.reshape(rows, -1)
    return StoredPart(type_name, data, DEPTH, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", [None, load_cpu_library()], ids=["numpy", "c"])
def test_mixed_types_give_the_bits_of_each_alone(library: CpuLibrary | None, dtype: Dtype) -> None:
    parts = [stored(name, rows, library=library) for name, rows in MIXED.items()]
    expected = [rounded(dequantize(part.data.reshape(-1), part.type_name), dtype).reshape(-1, DEPTH) for part in parts]
    matrix = StoredMatrix(parts)
    assert matrix.shape == (sum(MIXED.values()), DEPTH)
    assert np.array_equal(matrix.dense(dtype), np.concatenate(expected))
    assert all(
        np.array_equal(StoredMatrix([part]).dense(dtype), rows) for part, rows in zip(parts, expected, strict=True)
    )


def test_a_dense_matrix_is_no_copy_and_others_are_released() -> None:
    matrix, released = np.random.default_rng(0).standard_normal((3, 4), np.float32), list[str]()
    assert np.shares_memory(StoredMatrix.of(matrix).dense(FLOAT32), matrix)
    assert np.array_equal(StoredMatrix.of(matrix).dense(BFLOAT16), rounded(matrix, BFLOAT16))
    parts = [stored(name, 2, release=lambda name=name: released.append(name)) for name in ("Q4_K", "F32")]
    stored_parts = StoredMatrix(parts)
    assert released == []
    stored_parts.dense(BFLOAT16)
    assert released == ["Q4_K", "F32"]


def test_taking_concatenates_and_converts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_matrix, "_write", lambda *_: pytest.fail("converted before anybody asked"))
    q, k = StoredMatrix([stored("Q4_K", 3)]), StoredMatrix([stored("Q6_K", 2)])
    v, norm = np.ones((4, DEPTH), np.float32), np.arange(5, dtype=np.float32)
    parts = WeightParts(iter([("k", k), ("norm", norm), ("v", v), ("q", q)]))
    matrix = parts.take_matrix("q", "k", "v")
    assert [(part.type_name, part.rows) for part in matrix.parts] == [("Q4_K", 3), ("Q6_K", 2), ("F32", 4)]
    assert all(part.data is m.parts[0].data for part, m in zip(matrix.parts, (q, k), strict=False))
    taken = parts.take("norm")
    assert np.array_equal(taken, norm)
    assert not np.shares_memory(taken, norm)  # which may lie in a mapped file


def write_mixed(path: Path) -> None:
    """Random weights of CONFIG, each matrix in its type of TYPES, else Q4_0."""
    rng = np.random.default_rng(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG.num_hidden_layers)
    writer = gguf.GGUFWriter(path, "llama")
    for name, shape in expected_shapes(CONFIG).items():
        there = str(names.get_name(name, try_suffixes=(".weight",)))
        kind = TYPES.get(there.split(".")[-2], "Q4_0") if len(shape) > 1 else "F32"
        numbers = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5) + np.float32(len(shape) == 1)
        type_of = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(there, gguf.quantize(numbers, type_of), raw_dtype=type_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", [None, load_cpu_library()], ids=["numpy", "c"])
def test_a_model_of_mixed_types_is_that_of_its_dense_weights(
    library: CpuLibrary | None, dtype: Dtype, tmp_path: Path
) -> None:
    """Its Q, K and V are of three types, its gate and up of two."""
    path = tmp_path / "mixed.gguf"
    write_mixed(path)
    read = dict(load_weights(path, CONFIG, dtype, library))
    merged = [read[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert all(isinstance(weight, StoredMatrix) for weight in merged)
    assert [part.type_name for weight in merged for part in weight.parts] == ["Q8_0", "Q5_0", "F16"]
    converted = [(name, dense(weight, dtype).copy()) for name, weight in read.items()]
    logits = [
        Requests(Llama(CONFIG, weights, dtype, library=library), prompts(9, vocab_size=40)).step({0: 9})[0]
        for weights in (load_weights(path, CONFIG, dtype, library), converted)
    ]
    assert np.array_equal(*logits)
    assert logits[0].isfinite().all()


def write_in_one_type(path: Path, name: str) -> dict[str, np.ndarray[Any, Any]]:
    """A file of CONFIG with random blocks of this type in every matrix. Return what the gguf package reads in each."""
    rng, kind = np.random.default_rng(1), gguf.GGMLQuantizationType[name]
    weights, block_bytes = BLOCK_SIZES[name]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG.num_hidden_layers)
    writer, read = gguf.GGUFWriter(path, "llama"), {}
    for ours, shape in expected_shapes(CONFIG).items():
        there = str(names.get_name(ours, try_suffixes=(".weight",)))
        if len(shape) == 1:
            read[ours] = np.ones(shape, np.float32)
            writer.add_tensor(there, read[ours])
            continue
        blocks = rng.integers(0, 256, (shape[0], shape[1] // weights, block_bytes), np.uint8)
        set_scales(blocks, name, rng.standard_normal((*blocks.shape[:2], 1)) * 0.002)
        rows = blocks.reshape(shape[0], -1)
        writer.add_tensor(there, rows, raw_dtype=kind)
        read[ours] = gguf.dequantize(rows, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


@pytest.mark.parametrize("name", [name for name in BLOCK_TYPES if name in FILE_TYPES])
def test_a_model_in_one_type_is_that_of_the_gguf_packages_numbers(name: str, tmp_path: Path) -> None:
    """In float32, and in bfloat16 with the blocks as stored; logits are equal bit for bit."""
    path, library = tmp_path / "one.gguf", load_cpu_library()
    theirs = write_in_one_type(path, name)
    for dtype in DTYPES:
        ours = dict(load_weights(path, CONFIG, dtype, library))
        for key in theirs.keys() - {key for key in theirs if key.endswith(("q_proj.weight", "k_proj.weight"))}:
            expected = theirs[key] if theirs[key].ndim == 1 else rounded(theirs[key], dtype)
            assert np.array_equal(dense(ours[key], dtype), expected), key  # of Q and K the rows have another order
        converted = [(key, dense(weight, dtype).copy()) for key, weight in ours.items()]
        logits = []
        for weights, form in ((ours.items(), WeightForm.STORED), (converted, WeightForm.DENSE)):
            model = Llama(CONFIG, iter(weights), dtype, library=library, form=form)
            logits.append(Requests(model, prompts(9, vocab_size=40)).step({0: 9})[0])
        assert logits[0].isfinite().all()
        assert np.array_equal(*logits)
