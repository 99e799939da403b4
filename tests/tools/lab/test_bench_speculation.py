"""`engine-core bench speculation`: its record, on the fake executor. No test looks at a time's size."""

import json

import pytest

from tools.lab.bench import speculation
from tools.lab.bench.__main__ import main
from tools.lab.bench.workloads import make_workload


def test_speculation_is_measured_turn_about_and_changes_no_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speculation, "CASES", speculation.CASES[-1:])
    options = ("--executor", "fake", "--max-model-len", "1024")
    assert main(["speculation", *options]) == 0
    (record,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (record["name"], record["temperature"]) == ("batch32", 0.7)
    assert (record["num_different_requests"], record["num_tokens"]) == (0, make_workload("batch32").num_output_tokens)
    assert min(record[name] for name in ("ratio", "tokens_per_s_with", "tokens_per_s_without")) > 0
