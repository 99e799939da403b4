"""`engine-core inspect`: files that run, and files that do not, by their headers alone."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from core.model_files.inspection import inspect_model
from core.model_files.tensors import weights
from ipc.errors import ModelFileError
from ipc.files.model_files import resolve_model
from tests.core.model_files.test_packed_golden import folder_with, packing_of
from tests.frontend.test_model_files_end_to_end import write_gguf
from tests.placed import PREFIX
from tools.commands.inspect import EXIT_REFUSED, main
from tools.lab.bench.tiny_model import write_tiny_model


def test_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(resolve_model(None))
    assert lines[1].endswith("architecture llama")
    assert lines[3:5] == ["TYPE  TENSORS  IN FILE  IN MEMORY", "Q4_1  210      66.4 MB  5 bits a weight"]
    assert "KV cache in bfloat16  23.0 kB a token" in lines
    assert lines[-1] == "runs with this engine's own code"


def test_a_file_of_several_types_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_gguf(tmp_path / "model.gguf")), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    header = gguf.GGUFReader(tmp_path / "model.gguf")
    counts = {use["type"]: use["tensors"] for use in found["types"]}
    types = [tensor.tensor_type.name for tensor in header.tensors]
    assert counts == {name: types.count(name) for name in set(types)}
    assert found["file_bytes"] == sum(int(tensor.n_bytes) for tensor in header.tensors)
    assert found["refusals"] == []
    assert found["needs"]["kv_cache_per_token"] == 2 * 2 * 4 * 64 * 2  # K and V, layers, heads, numbers, bytes
    assert found["needs"]["weights_as_stored"] < 1.05 * found["file_bytes"]


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read where a file is mapped for them."""
    monkeypatch.setattr(weights, "_data_of", lambda *others: pytest.fail("a weight was read"))
    assert inspect_model(write_gguf(tmp_path / "model.gguf")).runs_with


def test_a_folder(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    found = inspect_model(tmp_path)
    assert (found.format, found.refusals) == ("safetensors", ())
    assert [(use.type, use.runs, use.bits_in_memory) for use in found.types] == [("BF16", True, None)]
    assert found.needs is not None
    assert found.needs.weights_dequantized == pytest.approx(found.file_bytes, rel=0.01)


def test_a_packed_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny model with one matrix of 64 x 64 in FP8, in 8.5 bits; and one that becomes dense."""
    (tmp_path / "plain").mkdir()
    write_tiny_model(tmp_path / "plain")
    plain = inspect_model(tmp_path / "plain")
    assert plain.needs is not None
    assert (plain.packing, plain.needs.weights_as_stored) == ("", plain.needs.weights_dequantized)
    for case, bits in (
        ("torchao-float8", 8.5),
        ("bitsandbytes-nf4", 4.5),
        ("bitsandbytes-int8", 16),
        ("compressed-tensors-nvfp4", 5),
        ("compressed-tensors-mxfp4", 4.25),
    ):
        (tmp_path / case).mkdir()
        assert main([str(folder_with(tmp_path / "plain", tmp_path / case, case))]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1].endswith(f"architecture LlamaForCausalLM, packed as {packing_of(case)}")
        found = inspect_model(tmp_path / case)
        assert found.needs is not None
        assert found.needs.weights_as_stored == plain.needs.weights_as_stored - 64 * 64 * (16 - bits) / 8
        assert all(use.runs for use in found.types)


def write(path: Path, architecture: str, kind: str) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    data = np.zeros((2, 64), np.int8) if kind == "I8" else np.zeros((2, 64), np.float32)
    writer.add_tensor("token_embd.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_is_refused_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write(tmp_path / "other.gguf", "no-such-model", "I8"))]) == EXIT_REFUSED
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split() == ["I8", "1", "128", "B", "refused"]
    assert any(line.startswith("refused: ") and "no-such-model" in line for line in lines)
    assert not any(line.startswith("runs") for line in lines)


def test_a_folder_that_transformers_would_run(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["SomeNewForCausalLM"]}))
    found = inspect_model(tmp_path)
    assert found.architecture == "SomeNewForCausalLM"
    assert "transformers" in found.runs_with
    assert found.needs is None


def test_a_name_that_is_not_in_the_cache_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{PREFIX}ipc.files.hub_cache.cached_models", list)
    with pytest.raises(ModelFileError, match="engine-core pull org/name:Q4_K_M"):
        main(["org/name:Q4_K_M"])


def test_damaged_headers_are_errors(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match="byte 4"):
        main([str(tmp_path / "bad.gguf")])
