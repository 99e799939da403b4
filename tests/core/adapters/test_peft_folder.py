"""PEFT folders: what is read from them, and that what is not done is refused by its name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from core.adapters.adapter import digest_of
from core.adapters.file_matrix import FileMatrix, FilePart
from core.adapters.peft_folder import read_peft_folder
from ipc.errors import EngineCoreError, ModelFileError, UnsupportedModelError
from kernels.low_rank import LowRank
from tests.core.adapters.peft_files import random_matrices, write_peft

SHAPES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in {"self_attn.q_proj": (32, 24), "self_attn.v_proj": (16, 24), "mlp.down_proj": (24, 40)}.items()
}
LAYERS = {name: FileMatrix((FilePart(name),)) for name in SHAPES}


def read(folder: Path, max_rank: int = 16) -> Any:
    return read_peft_folder(folder, LAYERS, SHAPES, max_rank)


def change(folder: Path, **settings: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_peft(tmp_path / "a", random_matrices(SHAPES, 4, 1), rank=4, alpha=8)


def test_matrices_scales_and_ranks(tmp_path: Path) -> None:
    ranks = {"v_proj": 2, "down_proj": 8}
    matrices = random_matrices(SHAPES, 4, 1, ranks=ranks)
    patterns = {"rank_pattern": {"v_proj": 2, r"layers\.\d+\.mlp\.down_proj": 8}, "alpha_pattern": {"q_proj": 32}}
    for is_stabilized in (False, True):
        settings: dict[str, Any] = {**patterns, "use_rslora": is_stabilized, "target_modules": "all-linear"}
        weights = read(write_peft(tmp_path / "a", matrices, rank=4, alpha=8, **settings))
        assert weights.rank == 8
        for name, (a, b) in matrices.items():
            found, alpha = weights.matrices[name], 32 if "q_proj" in name else 8
            assert np.array_equal(found.a, a)
            assert np.array_equal(found.b, b)
            rank = len(a)
            assert found.scale == pytest.approx(alpha / rank**0.5 if is_stabilized else alpha / rank)


def test_the_digest_is_of_the_content(tmp_path: Path, folder: Path) -> None:
    """Of matrices and scales, not of names of files, folders or settings that change nothing."""
    first, matrices = read(folder).digest, random_matrices(SHAPES, 4, 1)
    assert read(write_peft(tmp_path / "b", matrices, rank=4, alpha=8, lora_dropout=0.5, revision="x")).digest == first
    assert read(write_peft(tmp_path / "b", matrices, rank=4, alpha=8, prefix="base_model.model.")).digest == first
    headless = {name.removeprefix("model."): pair for name, pair in matrices.items()}
    assert read(write_peft(tmp_path / "c", headless, rank=4, alpha=8)).digest == first
    other = dict(matrices)
    name, (a, b) = next(iter(matrices.items()))
    b = b.copy()
    b[-1, -1] = np.nextafter(b[-1, -1], np.float32(9))
    other[name] = (a, b)
    digests = {first, read(write_peft(tmp_path / "d", other, rank=4, alpha=8)).digest}
    digests.add(read(write_peft(tmp_path / "e", matrices, rank=4, alpha=9)).digest)
    digests.add(read(write_peft(tmp_path / "f", dict(list(matrices.items())[:-1]), rank=4, alpha=8)).digest)
    digests.add(digest_of({name: LowRank(a.astype(np.float16), b, 2.0)}))
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"use_dora": True}, "use_dora is True: DoRA"),
        ({"bias": "all"}, "bias is 'all': the base model's biases"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]: whole modules"),
        ({"lora_bias": True}, "lora_bias is True: adapters with biases are not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the base model"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"of_a_later_peft": {"x": 1}}, "of_a_later_peft is .* this version does not support"),
        ({"r": 0}, "r must be a whole number above 0; got 0"),
        ({"r": 8}, "has rank 4, but adapter_config.json says 8"),
        ({"lora_alpha": None}, "lora_alpha must be a number; got None"),
        ({"lora_alpha": 1e40}, "lora_alpha must be a number; got 1e"),
        ({"alpha_pattern": {"q_proj": -1e300}}, "alpha_pattern must be a number; got -1e"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern: invalid regular expression"),
        ({"lora_alpha": 1e39}, r"lora_alpha must be a number; got 1e\+39"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number; got 1000"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number; got nan"),
    ],
)
def test_settings_that_are_not_done_are_refused_by_name(folder: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises((ModelFileError, UnsupportedModelError), match=text):
        read(change(folder, **settings))


def test_targets_without_tensors(tmp_path: Path) -> None:
    """PEFT writes targets that the model does not have, and those that exclude_modules leaves out."""
    matrices = random_matrices(SHAPES, 4, 1, targets=("q_proj", "down_proj"))
    folder = write_peft(tmp_path / "a", matrices, rank=4, alpha=8, target_modules=["q_proj", "down_proj", "dense_h"])
    digest = read(folder).digest
    change(folder, target_modules=["q_proj", "down_proj", "v_proj"], exclude_modules=["v_proj"])
    assert read(folder).digest == digest
    change(folder, exclude_modules=None)
    with pytest.raises(ModelFileError, match="names the target 'v_proj', but has no tensor for it"):
        read(folder)


def tensors_with(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (a, b) in random_matrices(SHAPES, 4, 1).items():
        found[f"base_model.model.{name}.lora_A.weight"], found[f"base_model.model.{name}.lora_B.weight"] = a, b
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    for key, value in changes.items():
        found[key.replace("Q", q).replace("__", ".")] = value
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"Q__lora_A__weight": None}, "has lora_B alone"),
        ({"Q__lora_A__weight": np.zeros((4, 23), np.float32)}, r"lora_A is \[4, 23\] and lora_B \[32, 4\]"),
        ({"Q__lora_B__weight": np.zeros((32, 5), np.float32)}, r"lora_B \[32, 5\]"),
        ({"Q__lora_A__weight": np.zeros(24, np.float32)}, "expected a matrix"),
        ({"Q__lora_A__weight": np.zeros((4, 24), np.int32)}, "is I32; supported are F32, F16, BF16"),
        ({"Q__lora_A__weight": np.full((4, 24), np.nan, np.float32)}, "lora_A of .* not finite"),
        ({"Q__lora_magnitude_vector": np.zeros(32, np.float32)}, "lora_magnitude_vector is not supported"),
        ({"base_model__model__lm_head__lora_A__weight": np.zeros((4, 24), np.float32)}, "lm_head"),
        ({"base_model__model__embed__lora_embedding_A": np.zeros((4, 24), np.float32)}, "of an encoder, and only with"),
        ({"Q__weight": np.zeros((32, 24), np.float32)}, "it is neither lora_A nor lora_B of a linear layer"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(folder: Path, changes: dict[str, Any], text: str) -> None:
    save_file(tensors_with(**changes), folder / "adapter_model.safetensors")
    with pytest.raises((ModelFileError, UnsupportedModelError), match=text):
        read(folder)


def test_what_is_no_folder_of_an_adapter(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelFileError, match="rank 4, but max_lora_rank is 3"):
        read(folder, 3)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelFileError, match=r"adapter_model\.bin is a pickle, which is never loaded"):
        read(folder)
    for content in (b"{", b"[]", b"[" * 100_000, b"\xff"):
        (folder / "adapter_config.json").write_bytes(content)
        with pytest.raises(ModelFileError):
            read(folder)


def test_damaged_files_raise_typed_errors(folder: Path) -> None:
    """Bytes changed at random places of either file."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        path, rng = folder / name, np.random.default_rng(3)
        whole = path.read_bytes()
        head = min(len(whole), 900)
        for _ in range(150):
            data = bytearray(whole)
            for at in rng.integers(0, head, 3):
                data[at] = rng.integers(256)
            path.write_bytes(data)
            try:
                read(folder)
            except EngineCoreError:
                continue
        path.write_bytes(whole)


def test_the_names_of_all_layers_are_looked_through_once(folder: Path) -> None:
    """Large models have thousands of names, and adapters of them thousands of tensors."""

    class Counted(dict[str, FileMatrix]):
        num_times = 0

        def __iter__(self) -> Iterator[str]:
            self.num_times += 1
            return super().__iter__()

    layers = Counted(LAYERS)
    read_peft_folder(folder, layers, SHAPES, 16)
    assert layers.num_times == 1
