"""The tokenizers of earlier sessions: one of the same files is not made again, and has bounds of its own."""

from pathlib import Path

import pytest

from frontend.http.wire.server import open_engine
from frontend.text.known_tokenizers import AHEAD, KnownTokenizers, make_ahead
from frontend.text.tokenizer import Tokenizer
from ipc.files.model_files import read_tokenizer_files, resolve_model, tokenizer_hash
from ipc.options.config import EngineConfig
from tests.frontend.http.caller import serving
from tests.frontend.http.conftest import FAKE
from tests.frontend.http.stored.test_responses import DEMO


def test_the_last_ones_are_known() -> None:
    files = read_tokenizer_files(resolve_model(None))
    tokenizer, known = Tokenizer.from_files(files), KnownTokenizers(2)
    for name in ("a", "b", ""):
        known.put(name, tokenizer, files)
    assert known.get("a") is not None
    known.put("c", tokenizer, files)
    assert [name for name in ("a", "b", "c", "") if known.get(name) is not None] == ["a", "c"]
    first, second = known.get("a"), known.get("a")
    assert first is not None
    assert second is not None
    first[0].most_uncut = 5
    assert (second[0].most_uncut, tokenizer.most_uncut) == (None, None)
    assert second[0].encode("A few words") == tokenizer.encode("A few words")


def test_a_second_session_makes_no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    known, from_files, made = KnownTokenizers(), Tokenizer.from_files, list[int]()
    monkeypatch.setattr(Tokenizer, "from_files", lambda files: made.append(1) or from_files(files))
    with serving(*FAKE, *DEMO) as caller:
        for _ in range(2):
            engine = open_engine(caller.connect, known=known)
            assert engine.tokenizer is not None
            assert engine.tokenizer.decode(engine.tokenizer.encode("A few words")) == "A few words"
            engine.close()
    assert made == [1]


def test_a_tokenizer_that_is_made_while_the_engine_starts_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from_files, made = Tokenizer.from_files, list[int]()
    monkeypatch.setattr(Tokenizer, "from_files", lambda files: made.append(1) or from_files(files))
    with serving(*FAKE, *DEMO) as caller:
        make_ahead(EngineConfig(model=str(resolve_model(None))))
        for num_made in (1, 2):
            engine = open_engine(caller.connect)
            assert engine.tokenizer is not None
            assert len(made) == num_made
            engine.close()


def test_files_that_are_wrong_are_left_to_the_session(tmp_path: Path) -> None:
    (tmp_path / "wrong.gguf").write_bytes(b"GGUF")
    make_ahead(EngineConfig(model=str(tmp_path / "wrong.gguf")))
    make_ahead(EngineConfig(executor="fake"))
    assert AHEAD.take(tokenizer_hash({})) is None
