"""`engine-core bench second-turn`: its records, with made-up weights. No test looks at a time's size."""

import json
from pathlib import Path

import pytest

from tests.core.process.tiny_lfm2 import SETTINGS
from tools.lab.bench.__main__ import main

pytestmark = pytest.mark.timeout(120)


def test_each_case_computes_less_than_the_whole_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**SETTINGS, "vocab_size": 50_000, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    options = ["--load-format", "dummy", "--threads", "1", "--max-model-len", "2048", "--model", str(tmp_path)]
    assert main(["second-turn", *options]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["case"] for record in records] == ["cold", "second turn", "partial prefix", "from files"]
    computed = {record["case"]: record["computed_tokens"] for record in records}
    assert computed["cold"] == 1024
    assert 64 < computed["second turn"] <= 64 + 64 + 16
    assert 64 < computed["partial prefix"] <= 64 + 128 + 16
    assert 64 < computed["from files"] <= 64 + 64 + 16
    assert all(record["ttft_ms"] > 0 and record["of_cold"] > 0 for record in records)
