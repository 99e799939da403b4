"""`engine-core bench lora`: its record, with a tiny model. No test looks at a time's size."""

import json
from pathlib import Path

import pytest

from tools.lab.bench import lora
from tools.lab.bench.__main__ import main
from tools.lab.bench.tiny_model import write_tiny_model
from tools.lab.bench.workloads import BenchRequest, Workload


def test_adapters_are_measured_turn_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "model")
    small = Workload("batch8", [BenchRequest([20 + number, 21, 22], 4) for number in range(8)], 1900)
    monkeypatch.setattr(lora, "make_workload", lambda name: small)
    monkeypatch.setattr(lora, "_RANKS", (4,))
    options = ("-m", str(tmp_path / "model"), "--dtype", "float32", "--threads", "1", "--kv-cache-memory-bytes", "8M")
    assert main(["lora", *options]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["case"] for record in records] == ["none", "one", "eight"]
    assert records[0]["has_tokens_of_base"] is True  # adapters of so small a model change few tokens, or none
    assert all(record["ratio"] > 0 and record["rank"] == 4 for record in records)
