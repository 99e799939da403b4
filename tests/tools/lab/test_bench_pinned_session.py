"""`engine-core bench pinned-session`: its records, with made-up tokens. No test looks at a time's size."""

import json

import pytest

from tools.lab.bench import pinned_session
from tools.lab.bench.__main__ import main


@pytest.mark.parametrize("given", [["--executor", "fake"], []], ids=["fake", "made up"])
def test_a_pinned_session_is_found_and_another_is_not(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        pinned_session, "SHAPE", pinned_session.SHAPE._replace(hidden=64, middle=64, heads=1, kv_heads=1)
    )
    monkeypatch.setattr(pinned_session, "FOREIGN_REQUESTS", 150)
    monkeypatch.setattr(pinned_session, "TURNS", 3)
    assert main(["pinned-session", *given, "--max-model-len", "1000"]) == 0
    pinned, unpinned = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (pinned["case"], pinned["hit_share"], pinned["num_pins_yielded"]) == ("pinned", 1.0, 0)
    assert (unpinned["case"], unpinned["hit_share"]) == ("unpinned", 0.0)
    assert pinned["session_tokens"] == 736
    assert all(record["ttft_p99_after_by_before"] > 0 for record in (pinned, unpinned))
