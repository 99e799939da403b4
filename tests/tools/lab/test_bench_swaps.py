"""`engine-core bench swap-in` and `weights-update`: their records, with tiny models. No test looks at a time's size."""

import json
from pathlib import Path

import pytest

from ipc.files.gguf import read_gguf
from ipc.files.gguf_strings import GgufStrings
from tests.core.draft_heads import LLAMA, model_shapes, random_weights, write
from tools.lab.bench import swap_in, weights_update
from tools.lab.bench.__main__ import main
from tools.lab.bench.large_model import Shape, write_large_model

TINY = Shape(layers=1, hidden=64, middle=128, heads=2, kv_heads=1, head_dim=32, tokens=49_500)


def test_a_made_up_model_has_the_sizes_and_the_vocabulary_that_were_asked_for(tmp_path: Path) -> None:
    write_large_model(tmp_path / "large.gguf", TINY)
    header = read_gguf(tmp_path / "large.gguf")
    tokens, kinds = header.metadata["tokenizer.ggml.tokens"], header.metadata["tokenizer.ggml.token_type"]
    merges = header.metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, GgufStrings)
    assert isinstance(kinds, list)
    assert isinstance(merges, GgufStrings)
    assert (len(tokens), len(set(tokens)), len(kinds)) == (49_500,) * 3
    assert tokens[-1] == str(merges[-1]).replace(" ", "")
    assert header.tensors["blk.0.ffn_down.weight"].shape == (64, 128)
    assert {tensor.type for tensor in header.tensors.values()} == {"F32", "Q4_0"}


def test_a_swapped_in_model_finds_its_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_in, "SHAPE", TINY)
    records = swap_in.measure_swap_in({"dtype": "bfloat16"}, rounds=1)
    record = next(records)
    records.close()
    assert (record["case"], record["cached_tokens"]) == ("alone", record["session_tokens"])
    assert record["first_token_ms"] > record["loaded_ms"] > 0


def test_streams_have_the_same_tokens_and_a_mark_for_each_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weights_update, "LENGTH", 60)
    monkeypatch.setattr(weights_update, "UPDATES", 1)
    model = {**LLAMA, "num_hidden_layers": 1, "vocab_size": 2048}
    write(tmp_path, model, random_weights(model_shapes(model), 1))
    assert main(["weights-update", "--model", str(tmp_path), "--threads", "1"]) == 0
    records = {record["case"]: record for record in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(records) == ["none", "path", "control"]
    for record in records.values():
        assert (record["tokens_lost"], record["tokens_different"], record["marks_lost"]) == (0, 0, 0)
    assert [record["updates"] for record in records.values()] == [0, 1, 1]
