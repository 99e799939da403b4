"""`replay --html`: one page without network and scripts, in which each request's time is told without a hole."""

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from core.capture.file import CaptureFile
from tests.captures import CONFIG, capture_in_process
from tests.core.capture.test_checkpoints import capture
from tools.cli import main
from tools.commands.replay.html.lives import DECODE, PROMPT, Life, Span, read_lives
from tools.commands.replay.html.page import NUM_SLOWEST
from tools.commands.replay.html.series import read_series

_VOID = {"meta"}


class Tags(HTMLParser):
    """Checks that tags nest, and notes their names and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.attributes |= {name for name, _ in attrs}
        if tag not in _VOID:  # a tag that closes itself is told as both
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "a.cap", tmp_path / "a.html"
    capture_in_process(source)
    assert main(["replay", str(source), "--html", str(out)]) == 0
    text = out.read_text()
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert tags.seen["svg"] >= 5 + NUM_SLOWEST
    assert not {"script", "link", "img", "iframe", "object"} & set(tags.seen)
    assert not {"src", "href", "onload", "onclick"} & tags.attributes
    assert not re.search(r"https?:|url\(|@import", text)
    assert "waits for KV blocks" in text
    assert PROMPT in text
    assert "nan" not in text.lower().replace("finance", "")
    assert main(["replay", str(source), "--html", str(out)]) == 1
    assert "File exists" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"max_num_seqs": 2}])
def test_lives_have_no_hole(tmp_path: Path, options: dict[str, object]) -> None:
    source = tmp_path / "a.cap"
    capture_in_process(source, msgspec.structs.replace(CONFIG, **options))
    file = CaptureFile(source)
    series = read_series(file)
    lives = read_lives(file, [(one.client, one.number) for one in series.requests])
    assert len(lives) == len(series.requests)
    whats = set()
    for one, life in zip(series.requests, lives, strict=True):
        assert life.key == (one.client, one.number)
        assert all(before.end_ns == after.begin_ns for before, after in zip(life.spans, life.spans[1:], strict=False))
        assert all(span.begin_ns <= span.end_ns for span in life.spans)
        assert life.spans[0].begin_ns == round(one.arrival * 1e9) + series.begin_ns
        if one.end is not None and one.how in ("stop", "length"):
            assert life.spans[-1].end_ns == pytest.approx(round(one.end * 1e9) + series.begin_ns, abs=2)
            assert sum(life.totals().values()) == life.spans[-1].end_ns - life.spans[0].begin_ns
        whats |= set(life.totals())
    assert {PROMPT, DECODE} < whats


def test_captures_of_all_kinds_become_pages(tmp_path: Path) -> None:
    """Beam searches, several choices, embeddings, pauses and holds."""
    source = tmp_path / "a.cap"
    capture(source, CONFIG, seed=4, num_steps=80)
    assert main(["replay", str(source), "--html", str(tmp_path / "a.html")]) == 0


def test_spans_follow_one_another() -> None:
    life = Life((1, 2), [Span("a", 0, 0)])
    life.enter("b", 0)
    life.enter("b", 5)
    life.enter("c", 7, (3, 4))
    life.enter("c", 8, (3, 5))
    assert [(span.what, span.begin_ns, span.end_ns) for span in life.spans] == [("b", 0, 7), ("c", 7, 8), ("c", 8, 8)]
    assert life.totals() == {"b": 7, "c": 1}
