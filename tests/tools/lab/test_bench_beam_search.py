"""`engine-core bench beam-search`: its record. No test looks at a time's size."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.lab.bench import beam_search
from tools.lab.bench.__main__ import main


def record_of(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["beam-search", "--dtype", "float32", "--threads", "1", "--reps", "2", *options]) == 0
    (record,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert min(record[name] for name in ("engine_s", "greedy_x4_s")) > 0
    return record


def test_the_ways_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def stand_in(*_: object) -> Any:
        return lambda prompt, count: calls.append((len(prompt), count)) or [[1] * count]

    monkeypatch.setattr(beam_search, "_transformers_search", stand_in)
    (tmp_path / "config.json").write_text("{}")
    record = record_of(capsys, "--executor", "fake", "--model", str(tmp_path), "--executor-option", "vocab_size=49152")
    assert calls == [(128, 4), (128, 64), (128, 64)]  # the first is to warm up
    assert (record["rounds"], record["rounds_with_equal_sequences"]) == (2, 0)


@pytest.mark.soak
def test_both_do_the_same_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50_000, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.5)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    monkeypatch.setattr(beam_search, "_OUTPUT", 8)
    threads = torch.get_num_threads()
    try:
        record = record_of(capsys, "--model", str(tmp_path))
    finally:
        torch.set_num_threads(threads)
    assert record["rounds_with_equal_sequences"] == 2
