"""docs/claims.md: its commands run as they stand, and print what the page says they print, apart from numbers."""

import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.user_programs import run

pytestmark = pytest.mark.checkout  # docs/

PAGE = Path(__file__).resolve().parent.parent / "docs" / "claims.md"
_NUMBER = re.compile(r"\b[0-9a-f]{16}\b|\d[\d.,]*")


class Claim(NamedTuple):
    heading: str
    programs: list[tuple[str, str]]  # language and text, one after the other
    printed: list[str]


def claims() -> list[Claim]:
    """The sections with something to run."""
    found = []
    for section in re.split(r"(?m)^## ", PAGE.read_text())[1:]:
        blocks = re.findall(r"(?ms)^```(sh|python|text)\n(.*?)^```", section)
        programs = [block for block in blocks if block[0] != "text"]
        printed = [line for language, text in blocks if language == "text" for line in text.splitlines()]
        if programs:
            found.append(Claim(section.splitlines()[0], programs, printed))
    return found


def masked(text: str) -> str:
    return _NUMBER.sub("N", text)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("index", range(5))
def test_a_claim_holds(index: int, tmp_path: Path) -> None:
    claim, lines = claims()[index], list[str]()
    for language, text in claim.programs:
        text = text.replace("/tmp/", f"{tmp_path}/")
        command = ["bash", "-eu", "-c", text] if language == "sh" else [sys.executable, "-c", text]
        code, output, errors = run(command, tmp_path)
        assert code == 0, (claim.heading, output, errors[-2000:])
        lines += output.replace(f"{tmp_path}/", "/tmp/").splitlines()
    left = [masked(line) for line in lines if line]
    for line in map(masked, claim.printed):  # in this order, with others between them
        assert line in left, (claim.heading, line, lines)
        del left[: left.index(line) + 1]


def test_each_section_with_a_program_is_run() -> None:
    found = claims()
    assert len(found) == 5
    assert all(claim.printed for claim in found)
