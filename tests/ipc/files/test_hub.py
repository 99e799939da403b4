"""Hugging Face names, in a cache made here, and with a Hub on this machine."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from huggingface_hub import constants

from ipc.errors import ModelFileError
from ipc.files.hub import fetch_model, uses_modelscope
from ipc.files.hub_cache import remove_cached
from ipc.files.hub_gguf import choose_gguf
from ipc.files.hub_name import HubName, hub_name, is_hub_name, parse_hub_name
from ipc.files.model_files import locate_model
from tests.hub_server import HubServer, hub_server
from tests.placed import placed

COMMIT = "a" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the library reads both settings from the environment when it is imported."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub that can be reached, and an empty cache."""
    with hub_server({}) as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


def add_snapshot(cache: Path, *files: str, commit: str = COMMIT, revision: str = "main") -> Path:
    folder = cache / "models--org--name"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubName("org/name")),
        ("HuggingFaceTB/SmolLM2-1.7B", HubName("HuggingFaceTB/SmolLM2-1.7B")),
        ("a/b@main", HubName("a/b", None, "main")),
        ("a/b.c@refs/pr/3", HubName("a/b.c", None, "refs/pr/3")),
        ("a_/1:Q4_K_M@v1.0", HubName("a_/1", "Q4_K_M", "v1.0")),
        ("hf.co/a/b-GGUF:q8_0", HubName("a/b-GGUF", "q8_0")),
        ("https://huggingface.co/a/b", HubName("a/b")),
        ("a/b:c-Q4_0.gguf", HubName("a/b", "c-Q4_0.gguf")),
    ],
)
def test_names(text: str, expected: HubName) -> None:
    assert parse_hub_name(text) == expected
    assert parse_hub_name(str(expected)) == expected


@pytest.mark.parametrize(
    "name",
    [
        "",
        "name",
        "a/b/c",
        "/a/b",
        "./a",
        "../a",
        "~/a",
        "a/",
        "a/b@",
        "a/b@-x",
        "a b/c",
        "a/m.gguf",
        "a/b\n",
        "é/b",
        "a/b:",
        "a:Q4/b",
        "a/b@v:Q4",
    ],
)
def test_no_names(name: str) -> None:
    assert not is_hub_name(name)


@pytest.mark.parametrize("revision", ["../..", "..", ".", "refs/../../x", "v1/.."])
def test_a_revision_does_not_lead_out_of_the_cache(cache: Path, revision: str) -> None:
    add_snapshot(cache, "config.json", "model.safetensors")
    for call in (fetch_model, locate_model, is_hub_name):
        with pytest.raises(ModelFileError, match=r"a revision is a branch, a tag or a commit, and must not contain"):
            call(f"org/name@{revision}")  # type: ignore[operator]


def test_of_a_revision_that_is_named_only_this_one_is_removed(cache: Path) -> None:
    main = add_snapshot(cache, "config.json", "model.safetensors")
    other = add_snapshot(cache, "config.json", "model.safetensors", commit="b" * 40, revision="v1")
    for text, left in (("org/name@main", [other]), ("org/name", [])):
        name = parse_hub_name(text)
        assert name is not None
        remove_cached(name)
        assert [one for one in (main, other) if one.exists()] == left


def test_a_snapshot_in_the_cache(cache: Path) -> None:
    main = add_snapshot(cache, "config.json", "model.safetensors")
    other = add_snapshot(cache, "config.json", "model.safetensors", commit="b" * 40, revision="v1")
    assert fetch_model("org/name") == main
    assert fetch_model("org/name@v1") == fetch_model("org/name@" + "b" * 40) == other
    assert locate_model("org/name") == str(main)
    assert hub_name(main) == "org/name"
    assert hub_name(cache) is None


def test_a_path_of_the_same_name_wins(cache: Path, tmp_path: Path) -> None:
    add_snapshot(cache, "config.json", "model.safetensors")
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    assert locate_model("org/name") == "org/name"
    assert locate_model(None) is None


def test_not_in_the_cache_and_no_network_is_one_error_that_says_both(cache: Path) -> None:
    with pytest.raises(ModelFileError) as caught:
        fetch_model("org/name@v1")
    text = str(caught.value)
    assert text.startswith(
        "org/name@v1 was not downloaded: HF_HUB_OFFLINE is set: unset it, or run `hf download org/name`"
    )
    assert f"It is not a file or folder on this machine, and {cache} has no org/name (OfflineModeIsEnabled: " in text
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "has no config.json"),
        (("config.json",), "expected model.safetensors or model.safetensors.index.json"),
        (("config.json", "pytorch_model.bin"), "is a pickle, which is never loaded"),
        (("config.json", "a.safetensors", "model.safetensors.index.json"), "has no b.safetensors"),
    ],
)
def test_a_snapshot_that_is_not_whole(cache: Path, files: tuple[str, ...], message: str) -> None:
    snapshot = add_snapshot(cache, *files)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    if "model.safetensors.index.json" in files:
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=message):
        fetch_model("org/name")
    if files:
        assert fetch_model("org/name", with_weights=False) == snapshot


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_needed_files_are_downloaded(hub: HubServer, tmp_path: Path) -> None:
    text = {"config.json", "tokenizer.json", "chat_template.jinja", "tokenizer_config.json"}
    text |= {"modules.json", "1_Pooling/config.json", "preprocessor_config.json", "processor_config.json"}
    text |= {"chat_template.json", "additional_chat_templates/tool_use.jinja", "config_sentence_transformers.json"}
    others = {
        "consolidated.safetensors",
        "2_Dense/pytorch_model.bin",
        "1_Pooling/README.md",
        "pytorch_model.bin",
        "model.pt",
        "README.md",
        "onnx/model.safetensors",
    }
    hub.repos["org/name"] = {
        name: name.encode() for name in {*text, *others, "model.safetensors", "2_Dense/model.safetensors"}
    }
    folder = fetch_model("org/name", with_weights=False)
    assert files_of(folder) == text
    assert fetch_model("org/name") == folder
    assert files_of(folder) == text | {"model.safetensors", "2_Dense/model.safetensors"}
    assert hub_name(folder) == "org/name"
    hub.calls.clear()
    assert fetch_model("org/name") == fetch_model("hf.co/org/name") == folder
    assert hub.calls == []  # a whole snapshot is used as it is
    hub.repos["org/name"]["config.json"] = b"{ }"
    assert fetch_model("org/name", is_update=True) == folder
    assert "GET /api/models/org/name/revision/main" in hub.calls


# --- GGUF files -----------------------------------------------------------------------------------------------------


def test_a_gguf_file_is_found_by_its_quantization_and_then_without_a_network(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/gguf"] = {
        name: name.encode() for name in ("m-Q8_0.gguf", "m-q4_k_m.gguf", "mmproj-F16.gguf", "README.md")
    }
    path = fetch_model("org/gguf:Q8_0")
    assert path.read_bytes() == b"m-Q8_0.gguf"
    assert hub_name(path) == "org/gguf:Q8_0"
    assert fetch_model("org/gguf") == path  # the only one here
    assert fetch_model("hf.co/org/gguf:q4_K_M").name == "m-q4_k_m.gguf"
    assert hub.downloads() == ["m-Q8_0.gguf", "m-q4_k_m.gguf"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_model("org/gguf:Q8_0") == fetch_model("org/gguf:M-q8_0.gguf") == path
    assert fetch_model("org/gguf").name == "m-q4_k_m.gguf"  # the usual one, since it is here now
    assert locate_model("org/gguf:Q8_0") == str(path)
    with pytest.raises(ModelFileError, match=r"org/gguf:Q5_0 was not downloaded: HF_HUB_OFFLINE is set.* has no Q5_0"):
        fetch_model("org/gguf:Q5_0")


@pytest.mark.parametrize(
    ("files", "wanted", "expected"),
    [
        (["a.Q4_0.gguf", "a.Q4_K_M.gguf"], None, "a.Q4_K_M.gguf"),
        (["a-Q8_0.gguf"], None, "a-Q8_0.gguf"),
        (["a-UD-Q4_K_XL.gguf", "a-IQ4_XS.gguf"], "q4_k_xl", "a-UD-Q4_K_XL.gguf"),
        (["BF16/a-BF16.gguf", "a-F16.gguf"], "bf16", "BF16/a-BF16.gguf"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "b-Q4_0.gguf", "b-Q4_0.gguf"),
        (["model.gguf"], None, "model.gguf"),
    ],
)
def test_which_file_is_meant(files: list[str], wanted: str | None, expected: str) -> None:
    assert choose_gguf(files, wanted, "org/name") == expected


@pytest.mark.parametrize(
    ("files", "wanted", "message"),
    [
        (["a-Q8_0.gguf", "a-F16.gguf"], None, "has no Q4_K_M: name another file; it has F16, Q8_0 (such as"),
        (["a-Q8_0.gguf", "a-F16.gguf"], "Q4_0", "org/name has no Q4_0; it has F16, Q8_0"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", "several files of Q4_0: name one, org/name:a-Q4_0.gguf, org"),
        (["a-Q4_0-00001-of-00003.gguf"], "Q4_0", "Q4_0 is split into 3 files, which this version does not read"),
        (["mmproj-F16.gguf"], "F16", "has no GGUF file for a quantization such as F16"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_there(files: list[str], wanted: str | None, message: str) -> None:
    with pytest.raises(ModelFileError, match=re.escape(message)):
        choose_gguf(files, wanted, "org/name")


# --- what the Hub refuses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ((403, "GatedRepo"), "the model is gated: accept its terms at {url}/org/name, then set HF_TOKEN"),
        ((401, "GatedRepo"), "the model is gated: accept its terms at {url}/org/name, then set HF_TOKEN"),
        ((401, "RepoNotFound"), "or it is private: check the spelling at {url}/org"),
        ((404, "RepoNotFound"), "the Hub has no model of this name, or it is private"),
        ((404, "RevisionNotFound"), "the model has no revision main: {url}/org/name/tree/main lists them"),
        ((401, ""), "the Hub refuses access: set HF_TOKEN to a valid token"),
        ((403, ""), "the Hub refuses access with this token: request access at {url}/org/name"),
        ((429, ""), "the Hub limits the rate of requests"),
        ((503, ""), "the Hub has an internal error: try again later"),
    ],
)  # fmt: skip
def test_a_refusal_is_named(refusal: tuple[int, str], message: str, hub: HubServer) -> None:
    hub.refusals["org/name"] = refusal
    with pytest.raises(ModelFileError) as caught:
        fetch_model("org/name")
    assert message.format(url=hub.url) in str(caught.value)


def test_no_connection_is_named(hub: HubServer) -> None:
    hub.close()
    with pytest.raises(ModelFileError, match=f"there is no connection to {hub.url}: try again, or run `hf download"):
        fetch_model("org/name")


def test_a_repository_without_a_model_says_what_it_has(hub: HubServer) -> None:
    hub.repos["org/name"] = {"config.json": b"{}", "pytorch_model.bin": b""}
    with pytest.raises(ModelFileError, match=r"it needs config\.json with .* and it has pytorch_model\.bin"):
        fetch_model("org/name")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelFileError, match="pip install huggingface_hub"):
        fetch_model("org/name")


def test_the_environment_decides_and_nothing_is_imported_for_a_path(tmp_path: Path) -> None:
    snapshot = add_snapshot(tmp_path / "home" / "hub", "config.json", "model.safetensors")
    code = (
        "import sys; from ipc.files.model_files import locate_model; locate_model(sys.argv[1]);"
        "assert 'huggingface_hub' not in sys.modules; print(locate_model('org/name'))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", placed(code), str(snapshot)],
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(snapshot)


# --- ModelScope -----------------------------------------------------------------------------------------------------

#: Enough of its library to see what it is asked for: calls of both functions, files of FILES in the folder FOLDER.
LIBRARY = """
import pathlib
FILES, calls, FOLDER = {files!r}, [], pathlib.Path({folder!r})

class HubApi:
    def get_model_files(self, model_id, revision=None, root=None, recursive=True):
        calls.append(("files", model_id, revision))
        return [dict(Path=name, Size=2) for name in FILES]

def snapshot_download(model_id, revision=None, local_files_only=False, allow_patterns=None):
    calls.append(("cache" if local_files_only else "download", model_id, revision))
    if local_files_only and not FOLDER.is_dir():
        raise ValueError("Cannot find cached snapshot")
    if not local_files_only:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name in allow_patterns:
            (FOLDER / name).write_text("{{}}")
    return str(FOLDER)
"""
FILES = ["config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "README.md"]


@pytest.fixture
def modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str]], ModuleType]]:
    """A function that makes a library modelscope with these files, and returns the module that it is."""
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")

    def made(files: list[str]) -> ModuleType:
        folder = tmp_path / "models" / "org--name" / "snapshots" / "master"
        library = tmp_path / "library" / "modelscope" / "hub"
        library.mkdir(parents=True)
        for package in (library.parent, library):
            (package / "__init__.py").touch()  # a folder without it comes after an installed package
        (library / "api.py").write_text(LIBRARY.format(files=files, folder=str(folder)))
        (library / "snapshot_download.py").write_text("from modelscope.hub.api import snapshot_download\n")
        monkeypatch.syspath_prepend(str(library.parent.parent))
        return importlib.import_module("modelscope.hub.api")

    before = {name for name in sys.modules if name.partition(".")[0] == "modelscope"}
    assert not before
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == "modelscope"]:
        del sys.modules[name]


def test_a_model_comes_from_modelscope(modelscope: Callable[[list[str]], ModuleType], tmp_path: Path) -> None:
    library = modelscope(FILES)
    path = fetch_model("org/name@v1")
    assert path == library.FOLDER
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert library.calls == [(call, "org/name", "v1") for call in ("cache", "files", "download")]
    assert hub_name(path) == "org/name"
    library.calls.clear()
    assert locate_model("org/name") == str(path)  # without a call that needs a network
    assert library.calls == [("cache", "org/name", None)]
    fetch_model("org/name", is_update=True)
    assert library.calls[1:] == [("files", "org/name", None), ("download", "org/name", None)]
    (path / "model.safetensors").unlink()
    assert fetch_model("org/name", with_weights=False) == path
    assert locate_model("org/name") == str(path)
    assert (path / "model.safetensors").is_file()


def test_an_error_of_its_library_is_said_with_what_the_cache_lacks(
    modelscope: Callable[[list[str]], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = modelscope(FILES)
    path = fetch_model("org/name")
    monkeypatch.setattr(library.HubApi, "get_model_files", lambda *args, **options: [][0])
    assert fetch_model("org/name") == path
    with pytest.raises(ModelFileError, match=r"^org/name was not downloaded from ModelScope \(IndexError: .*a folder$"):
        fetch_model("org/name", is_update=True)
    (path / "model.safetensors").unlink()
    with pytest.raises(
        ModelFileError, match=r"ModelScope, and .*/snapshots/master: expected model.safetensors .* \(Index"
    ):
        fetch_model("org/name")


def test_a_gguf_file_comes_from_modelscope(modelscope: Callable[[list[str]], ModuleType]) -> None:
    library = modelscope(["m-Q4_0.gguf", "m-Q8_0.gguf"])
    path = fetch_model("org/name:q8_0")
    assert path == library.FOLDER / "m-Q8_0.gguf"
    assert hub_name(path) == "org/name:Q8_0"
    assert [file.name for file in library.FOLDER.iterdir()] == ["m-Q8_0.gguf"]


def test_what_modelscope_has_not_is_said(modelscope: Callable[[list[str]], ModuleType]) -> None:
    modelscope(["pytorch_model.bin"])
    with pytest.raises(ModelFileError, match=r"needs config.json with \*.safetensors.* it has pytorch_model.bin"):
        fetch_model("org/name")


@pytest.mark.parametrize(
    ("ours", "vllms", "is_asked_for"),
    [("1", None, True), ("no", "True", False), (None, "true", True), (None, "False", False), (None, None, False)],
)
def test_the_environment_asks_for_modelscope(
    ours: str | None, vllms: str | None, is_asked_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ENGINE_CORE_USE_MODELSCOPE", ours), ("VLLM_USE_MODELSCOPE", vllms)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert uses_modelscope() == is_asked_for
    monkeypatch.setenv("ENGINE_CORE_USE_MODELSCOPE", "perhaps")
    with pytest.raises(ModelFileError, match="ENGINE_CORE_USE_MODELSCOPE must be True or False; got 'perhaps'"):
        fetch_model("org/name")


def test_without_modelscopes_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(
        ModelFileError, match=r"the package modelscope \(.*\): pip install modelscope, or .*\[modelscope\]"
    ):
        fetch_model("org/name")


def test_modelscopes_own_library(tmp_path: Path) -> None:
    """Its functions have the arguments that we give them, and its cache the form in which we find names."""
    pytest.importorskip("modelscope_hub", reason="the extra modelscope is not installed")
    asked = "print(*map(locate_model, ('org/name', 'org/name', 'org/other:Q8_0')), sep='\\n')"
    program = f"from ipc.files.model_files import locate_model; {asked}"
    files = dict.fromkeys(FILES, b"{}")
    with hub_server({"org/name": files, "org/other": {"m-Q4_0.gguf": b"4", "m-Q8_0.gguf": b"8"}}) as server:
        environment = {
            **os.environ,
            "ENGINE_CORE_USE_MODELSCOPE": "1",
            "MODELSCOPE_ENDPOINT": server.url,
            "MODELSCOPE_CACHE": str(tmp_path),
        }
        command = [sys.executable, "-c", program]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        calls = [call for call in server.calls if call.startswith("GET") and call.endswith("/repo")]
    assert run.returncode == 0, run.stderr
    first, second, third = map(Path, run.stdout.splitlines()[-3:])
    assert first == second
    assert (hub_name(first), hub_name(third)) == ("org/name", "org/other:Q8_0")
    assert {file.name for file in first.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert third.read_bytes() == b"8"
    assert len(calls) == 4  # no file twice, and none that is not needed
