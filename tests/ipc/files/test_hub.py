"""Hugging Face names, in a cache made here and without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from ipc.errors import ModelFileError
from ipc.files.hub import fetch_model, hub_name, is_hub_name
from ipc.files.model_files import locate_model

COMMIT = "a" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the library reads both settings from the environment when it is imported."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def add_snapshot(cache: Path, *files: str, commit: str = COMMIT, revision: str = "main") -> Path:
    folder = cache / "models--org--name"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


@pytest.mark.parametrize("name", ["org/name", "HuggingFaceTB/SmolLM2-1.7B", "a/b@main", "a/b.c@refs/pr/3", "a_/1@v1.0"])
def test_names(name: str) -> None:
    assert is_hub_name(name)


@pytest.mark.parametrize(
    "name",
    ["", "name", "a/b/c", "/a/b", "./a", "../a", "~/a", "a/", "a/b@", "a/b@-x", "a b/c", "a/m.gguf", "a/b\n", "é/b"],
)
def test_no_names(name: str) -> None:
    assert not is_hub_name(name)


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
        f"org/name@v1 is no file or folder here, not whole in the Hugging Face cache at {cache}, and"
    )
    assert "could not be downloaded: OfflineModeIsEnabled: " in text
    assert "hf download org/name" in text
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


def test_only_needed_files_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call looks at the cache only, the second downloads."""
    published = [
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "chat_template.jinja",
        "consolidated.safetensors",
    ]
    published += ["pytorch_model.bin", "model.pt", "README.md", "onnx/model.safetensors", "tokenizer_config.json"]
    calls = []

    def download(repo: str, **options: object) -> str:
        calls.append((repo, options))
        if options["local_files_only"]:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        kept = huggingface_hub.utils.filter_repo_objects(
            published, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
        )
        for name in kept:
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch_model("org/name@v1") == tmp_path
    assert [(repo, options["revision"], options["local_files_only"]) for repo, options in calls] == [
        ("org/name", "v1", True),
        ("org/name", "v1", False),
    ]
    text = {"config.json", "tokenizer.json", "chat_template.jinja", "tokenizer_config.json"}
    assert {path.name for path in tmp_path.iterdir()} == text | {"model.safetensors"}


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
        [sys.executable, "-P", "-c", code, str(snapshot)],
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(snapshot)
