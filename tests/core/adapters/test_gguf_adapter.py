"""GGUF adapters: the same matrices as in the PEFT folder that they were made of."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from core.adapters.file_matrix import FileMatrix, FilePart
from core.adapters.peft_folder import read_peft_folder
from core.adapters.store import read_gguf_adapter
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.tables.arrays import Floats
from tests.core.adapters.peft_files import random_matrices, write_peft

SHAPES = {"model.layers.0.self_attn.q_proj": (32, 32), "model.layers.0.mlp.down_proj": (32, 64)}
HEADS = 4  # of q_proj
#: Where the rows of q_proj are: those of a head's first half are at even places, those of its second half at odd ones.
ROWS = np.concatenate([head * 8 + np.array([*range(0, 8, 2), *range(1, 8, 2)]) for head in range(HEADS)])
LAYERS = {
    "blk.0.attn_q": FileMatrix((FilePart("model.layers.0.self_attn.q_proj", ROWS),), 32),
    "blk.0.ffn_down": FileMatrix((FilePart("model.layers.0.mlp.down_proj"),)),
}
PEFT_LAYERS = {name: FileMatrix((FilePart(name),)) for name in SHAPES}
GGUF_NAMES = {layer.parts[0].name: name for name, layer in LAYERS.items()}


def interleaved(b: Floats, heads: int) -> Floats:
    """As llama.cpp's converter permutes the rows of q and k (LlamaModel.permute)."""
    return b.reshape(heads, 2, b.shape[0] // heads // 2, *b.shape[1:]).swapaxes(1, 2).reshape(b.shape)


def write(path: Path, matrices: Any, alpha: float = 8.0, kind: str = "lora", **types: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, (a, b) in matrices.items():
        stored = GGUF_NAMES.get(name, name)
        for part, numbers in (("lora_a", a), ("lora_b", interleaved(b, HEADS) if stored == "blk.0.attn_q" else b)):
            wanted = types.get(part)
            if wanted is None:
                writer.add_tensor(f"{stored}.weight.{part}", np.ascontiguousarray(numbers))
            else:
                data = gguf.quants.quantize(np.ascontiguousarray(numbers), wanted)
                writer.add_tensor(f"{stored}.weight.{part}", data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_is_the_adapter_of_its_peft_folder(tmp_path: Path) -> None:
    """Its digest too, so that both share blocks of the prefix cache."""
    matrices = random_matrices(SHAPES, 4, 1)
    folder = write_peft(tmp_path / "peft", matrices, rank=4, alpha=8)
    peft = read_peft_folder(folder, PEFT_LAYERS, SHAPES, 16)
    found = read_gguf_adapter(write(tmp_path / "a.gguf", matrices), LAYERS, SHAPES, 16)
    assert found.digest == peft.digest
    assert found.matrices.keys() == peft.matrices.keys()
    for name, matrix in found.matrices.items():
        assert np.array_equal(matrix.b, matrices[name][1])


def test_types_and_a_file_without_alpha(tmp_path: Path) -> None:
    matrices = random_matrices(SHAPES, 32, 2)
    half = {name: (a.astype(np.float16), b.astype(np.float16)) for name, (a, b) in matrices.items()}
    found = read_gguf_adapter(write(tmp_path / "a.gguf", half, alpha=0.0), LAYERS, SHAPES, 32)
    for name, matrix in found.matrices.items():
        assert (matrix.scale, matrix.a.dtype) == (1.0, np.float16)
        assert np.array_equal(matrix.b, half[name][1])
    q8 = gguf.GGMLQuantizationType.Q8_0
    found = read_gguf_adapter(write(tmp_path / "b.gguf", matrices, lora_a=q8, lora_b=q8), LAYERS, SHAPES, 32)
    for name, matrix in found.matrices.items():
        assert np.abs(matrix.b - matrices[name][1]).max() < 0.01


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": "control_vector"}, "expected an adapter of type lora"),
        ({"alpha": float("nan")}, "adapter.lora.alpha must be a number"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = write(tmp_path / "a.gguf", random_matrices(SHAPES, 4, 1), **changes)
    with pytest.raises(ModelFileError, match=text):
        read_gguf_adapter(path, LAYERS, SHAPES, 16)


def test_tensors_of_other_matrices_are_refused(tmp_path: Path) -> None:
    matrices = random_matrices(SHAPES, 4, 1)
    matrices["token_embd"] = (np.ones((4, 32), np.float32), np.ones((100, 4), np.float32))
    with pytest.raises(UnsupportedModelError, match="token_embd"):
        read_gguf_adapter(write(tmp_path / "a.gguf", matrices), LAYERS, SHAPES, 16)
