"""The models that --models names, and how long they stay."""

from math import inf
from pathlib import Path

import msgspec
import pytest

from frontend.http.many.catalog import Catalog, entry_of, keep_alive_s, read_catalog
from frontend.http.many.messages import MAX_CREATED
from ipc.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(0, 0), ("0", 0), (30, 30), ("5m", 300), ("1h30m", 5400), (-1, inf), ("-1m", inf), ("1.5", 1.5)],
)
def test_keep_alive(given: object, seconds: float) -> None:
    assert keep_alive_s(given) == seconds


@pytest.mark.parametrize("given", ["soon", True, None, [], "5 m", "nan"])
def test_wrong_keep_alive(given: object) -> None:
    with pytest.raises(ValueError, match="keep_alive is"):
        keep_alive_s(given)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        'memory = "2G"\nkeep_alive = "10m"\n[models.chat]\nmodel = "org/chat"\nmax_num_seqs = 8\naliases = ["gpt"]\n'
        '[models.embed]\nmodel = "org/embed"\nkeep_alive = -1\nadapters = {tone = "/tone"}\n'
    )
    catalog = read_catalog(str(path), {"max_num_seqs": 4, "block_size": 32})
    chat, embed = catalog.by_name.values()
    assert catalog.memory == 2 << 30
    assert (chat.options["max_num_seqs"], chat.options["block_size"], chat.keep_alive_s) == (8, 32, 600)
    assert (embed.options["max_num_seqs"], embed.keep_alive_s, embed.config().enable_lora) == (4, inf, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n[models.a]\n", "got x"),
        ("", "table .models.NAME."),
        ("[models.a]\nmax_num_sqs = 1\n", "the model 'a': unknown option 'max_num_sqs'; did you mean"),
        ("[models.a]\naliases = 1\n", "the model 'a': aliases: Expected"),
        ('[models.a]\n[models.b]\naliases = ["a"]\n', "two models have the name 'a'"),
        ("[models.a]\nkeep_alive = 'soon'\n", "the model 'a': keep_alive is"),
        ("[models.'../a']\n", "cannot name a model"),
        ("memory = 'much'\n[models.a]\n", "memory: "),
        ("[", "is not TOML"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_catalog(str(path), {})


def test_names() -> None:
    catalog = read_catalog("org/a, org/b:Q4_K_M", {})
    assert {name: entry.options for name, entry in catalog.by_name.items()} == {
        "org/a": {"model": "org/a"},
        "org/b:Q4_K_M": {"model": "org/b:Q4_K_M"},
    }


def test_a_created_model_replaces_no_file_of_another(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text('name = "other"\nmodel = "a/b"\n')
    catalog = read_catalog(str(tmp_path), {})
    with pytest.raises(ConfigError, match=r"'small' would be written over small\.toml"):
        catalog.keep(entry_of("small", {"model": "c/d"}))
    catalog.keep(entry_of("x/y", {"model": "c/d"}))
    with pytest.raises(ConfigError, match=r"over x--y\.toml"):
        catalog.keep(entry_of("x--y", {"model": "e/f"}))
    assert set(read_catalog(str(tmp_path), {}).by_name) == {"other", "x/y"}


def test_the_number_of_created_models_is_bounded(tmp_path: Path) -> None:
    one = entry_of("base", {"executor": "fake"})
    catalog = Catalog([one])
    for number in range(MAX_CREATED):
        catalog.keep(msgspec.structs.replace(one, name=f"made-{number}"))
    with pytest.raises(ConfigError, match="256 created models; delete one"):
        catalog.keep(msgspec.structs.replace(one, name="more"))
    catalog.remove("made-7")
    catalog.keep(msgspec.structs.replace(one, name="more"))
    # In a folder they count after a restart too; what its owner has put there does not.
    kept = Catalog([], folder=tmp_path)
    kept.keep(one)
    (tmp_path / "own.toml").write_text('executor = "fake"')
    assert {name: each.is_created for name, each in read_catalog(str(tmp_path), {}).by_name.items()} == {
        "base": True,
        "own": False,
    }


def test_a_folder_keeps_what_is_created(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").touch()
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "config.json").touch()
    catalog = read_catalog(str(tmp_path), {})
    assert [*catalog.by_name] == ["big", "small"]
    made = entry_of("org/x:y", {"model": "m", "system": 'say "é"\n\x7f', "override_generation_config": {"top_k": 3}})
    kept = catalog.keep(made)
    again = read_catalog(str(tmp_path), {}).by_name["org/x:y"]
    assert again == kept
    catalog.remove("org/x:y")
    assert [*read_catalog(str(tmp_path), {}).by_name] == ["big", "small"]
