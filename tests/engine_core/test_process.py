"""engine_core.process: what docs/operations.md shows a program that starts an engine of its own."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


@pytest.mark.checkout
def test_the_snippet_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"(?ms)^```python\n(import time\nfrom engine_core\.process .*?)^```", PAGE.read_text())
    exec(compile(code, str(PAGE), "exec"), {})
    epoch, num_begun, is_in_step, seconds = capsys.readouterr().out.split()
    assert (epoch, num_begun, is_in_step) == ("0", "0", "False")
    assert 0 <= float(seconds) < 60
