"""Public traces through the scheduler in virtual time: formats, the scaling rule, the clock, the report."""

import json
import re
import shlex
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest

from core.batch.request import Request
from core.scheduling.admission import Admission
from ipc.errors import ConfigError
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest
from tests.resolved import resolved_config
from tools.cli import main
from tools.lab.traces.__main__ import _parser
from tools.lab.traces.formats import read_trace
from tools.lab.traces.report import BEGIN, END
from tools.lab.traces.row import Row, Trace
from tools.lab.traces.simulation import StepTime, simulate
from tools.lab.traces.workload import TimedRequest, make_workload

DATA = Path(__file__).resolve().parent.parent.parent / "data"
DOCUMENT = DATA.parent.parent / "docs" / "scheduling.md"
MOONCAKE = DATA / "mooncake_conversation_50.jsonl"
AZURE = DATA / "azure2023_conv_50.csv"
#: Little room, so that 50 requests are enough to press.
PRESSED = ["--time-scale", "0.05", "--num-blocks-override", "600"]


def prompts(rows: list[Row], max_tokens: int = 8192) -> list[list[int]]:
    workload = make_workload(
        Trace("rows", rows), max_tokens=max_tokens, time_scale=1.0, num_clients=3, vocab_size=32_000
    )
    return [np.frombuffer(request.message.prompt_token_ids, "<i4").tolist() for request in workload.requests]


def test_mooncake_rows() -> None:
    rows = read_trace(MOONCAKE).rows
    assert len(rows) == 50
    assert rows[0] == Row(0.0, 6758, 500, tuple(range(14)))
    assert rows[-1].arrival_s > 0


def test_azure_rows_keep_seven_digits_of_a_second() -> None:
    rows = read_trace(AZURE, 3).rows
    assert [row[1:3] for row in rows] == [(374, 44), (396, 109), (879, 55)]
    assert rows[1].arrival_s == pytest.approx(50.9951690 - 46.6805900, abs=1e-6)
    assert rows[2].arrival_s == pytest.approx(51.2224670 - 46.6805900, abs=1e-6)


def test_measured_rows_never_mix_the_two_clocks(tmp_path: Path) -> None:
    record = {"input_toks": 7, "output_toks": 3, "queued_ts": 20.0, "scheduled_ts": 20.5, "last_token_ts": 30.0}
    lines = [
        json.dumps({**record, "arrival_time": 1.7e9 + arrival, "first_token_ts": 20.0 + ttft})
        for arrival, ttft in ((5.0, 2.0), (4.0, 1.5))
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines))
    assert read_trace(path).rows == [Row(0.0, 7, 3, None, 1.5, 10.0), Row(1.0, 7, 3, None, 2.0, 10.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', r"row 1: 1 hash_ids; 513 .* 2 "),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}', "row 1: output_length is missing"),
        ('{"timestamp": 0, "input_length": -1, "output_length": 1, "hash_ids": []}', "row 1: expected a whole number"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "row 1: expected a number"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\nyesterday,1,1", "row 2: "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,0,44", "row 1: 0 input"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,3", "row 1: "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "holds no requests"),
        ("0,8.34,1.3590915521086142,Gamma,0.541380457558393,0.21162503501556937", "ServeGen's windows"),
        ("hello", "known are Mooncake's"),
        ("", "known are Mooncake's"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(tmp_path / "nowhere")


def test_equal_blocks_become_equal_tokens_at_any_scale() -> None:
    """The first block is shared, the second not, the third has an equal id but stands behind another."""
    rows = [Row(0.0, 1536, 1, (1, 2, 3)), Row(0.0, 1500, 1, (1, 9, 3))]
    for max_tokens, size in ((8192, 512), (1000, 333), (7, 2)):
        first, second = prompts(rows, max_tokens)
        assert first[:size] == second[:size]
        assert first[size : 2 * size] != second[size : 2 * size]
        shared = 1500 * size // 512 - 2 * size
        assert first[2 * size :][:shared] == second[2 * size :]
        assert len(first) == 3 * size
        assert min(first) >= 3


def test_rows_without_hash_ids_share_nothing() -> None:
    one, other = prompts([Row(0.0, 300, 1), Row(0.0, 300, 1)])
    assert one[:4] != other[:4]


def test_lengths_are_scaled_so_that_the_longest_fits() -> None:
    trace = Trace("rows", [Row(0.0, 3000, 1096), Row(2.0, 10, 1), Row(3.0, 100, 0)])
    workload = make_workload(trace, max_tokens=1024, time_scale=0.5, num_clients=3, vocab_size=1000)
    assert workload.length_scale == 0.25
    lengths = [(len(one.message.prompt_token_ids) // 4, one.message.params.max_tokens) for one in workload.requests]
    assert lengths == [(750, 274), (2, 1), (25, 1)]
    assert [one.arrival_ns for one in workload.requests] == [0, 10**9, 15 * 10**8]
    assert [one.client for one in workload.requests] == [0, 1, 0]
    assert [one.message.priority for one in workload.requests] == [0, 1, 1]
    with pytest.raises(ConfigError, match="use at least 8"):
        make_workload(trace, max_tokens=7, time_scale=1.0, num_clients=3, vocab_size=1000)


def test_the_clock_is_the_stated_step_time() -> None:
    """One request: 100 tokens in chunks of 64, three sampled; a second comes while the first chunk runs."""
    config = resolved_config(50, 200, max_num_seqs=1, max_num_batched_tokens=64)
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
    messages = [AddRequest(number, np.arange(100, dtype="<i4").tobytes(), params, 0) for number in range(2)]
    requests = [TimedRequest(500 + 7 * number, number, message) for number, message in enumerate(messages)]
    observed = simulate(config, requests, StepTime(fixed_ns=1000, token_ns=10, context_ns=0.5, copy_ns=0))
    first = 500 + (1000 + 640 + 32) + (1000 + 360 + 50)
    last = first + 2 * 1010 + 51 + 50  # 101 and 102 tokens of context, halved; halves round to even
    assert observed.arrivals.tolist() == [500, 507]
    assert observed.first_tokens[0] == first
    assert observed.last_tokens[0] == last
    assert observed.scheduled.tolist() == [500, last]  # there is one row
    assert observed.finished.tolist() == [1, 1]
    assert observed.num_tokens.tolist() == [3, 3]
    assert observed.stats.prefix_cache_hits == 96  # the second finds the first one's blocks
    assert observed.end_ns == observed.last_tokens[1]


@pytest.mark.checkout  # docs/
def test_the_documented_command_finishes_and_each_policy_favours_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(DOCUMENT.parent.parent)
    (command,) = re.findall(r"(?m)^    engine-core (traces tests/data/.*)$", DOCUMENT.read_text())
    words = shlex.split(command.replace("/tmp/report.md", str(tmp_path / "report.md")))
    assert main(words) == 0
    assert (tmp_path / "report.svg").is_file()
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    keys = [(record["trace"], record["policy"]) for record in records]
    assert keys == [(path.name, policy) for path in (MOONCAKE, AZURE) for policy in ("fcfs", "priority", "fair")]
    assert all(record["finished"] == record["requests"] == 50 for record in records)
    for fcfs, priority, fair in (records[:3], records[3:]):
        assert priority["ttft_s_of"]["urgent"]["p90"] < 0.7 * fcfs["ttft_s_of"]["urgent"]["p90"]
        assert fair["ttft_s_of"]["other_clients"]["p90"] < fcfs["ttft_s_of"]["other_clients"]["p90"]
        assert all(record["queueing_s"]["p50"] < record["ttft_s"]["p50"] for record in (fcfs, priority, fair))
    assert sum(record["preemptions"] for record in records) > 0
    assert all(record["prefix_hit_rate"] > 0 for record in records[:3])
    assert "recorded_ttft_s" not in records[0]


@pytest.mark.checkout  # docs/
def test_every_option_of_the_document_exists() -> None:
    known = {flag for action in _parser()._actions for flag in action.option_strings}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", DOCUMENT.read_text()))
    assert named - known == {"--connect", "--client-name"}  # of engine-core explain, of generate
    assert len(named) > 20


def test_a_run_repeats_to_the_last_digit(capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for _ in range(2):
        assert main(["traces", str(AZURE), *PRESSED, "--scheduling-policy", "fair", "--preemption-mode", "swap"]) == 0
        lines.append(json.loads(capsys.readouterr().out))
        del lines[-1]["wall_s"]
    assert lines[0] == lines[1]
    assert lines[0]["preemption_mode"] == "swap"


def test_requests_that_do_not_finish_are_counted_and_make_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler is made to refuse the longest."""

    def never_fits(_: Admission, request: Request) -> str | None:
        return "too long" if request.max_total_tokens > 2000 else None

    monkeypatch.setattr(Admission, "never_fits", never_fits)
    assert main(["traces", str(AZURE), "--scheduling-policy", "fcfs"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert 0 < record["finished"] < record["requests"]


def test_whole_prompts_have_a_budget_for_the_longest(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--no-enable-chunked-prefill", "--scheduling-policy", "fcfs", "--rows", "20"]
    assert main(["traces", str(AZURE), *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["finished"] == record["requests"] == 20


def test_report_replaces_what_stands_between_its_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        assert main(["traces", str(MOONCAKE), "--rows", "5", "--report", str(path)]) == 0
    text = path.read_text()
    assert text.startswith(f"before\n{BEGIN}\n`engine-core traces {MOONCAKE.name} --rows 5 --report report.md`")
    assert text.endswith(f"![Time to first token, by policy](report.svg)\n{END}\nafter\n")
    assert "old" not in text
    assert [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| mooncake")] == [
        "fcfs",
        "priority",
        "fair",
    ]
    root = xml.etree.ElementTree.parse(tmp_path / "report.svg").getroot()
    assert len(root.findall(".//{*}polyline")) == 3
    path.write_text("no marks")
    assert main(["traces", str(MOONCAKE), "--rows", "5", "--report", str(path)]) == 1
    assert BEGIN in capsys.readouterr().err
    assert path.read_text() == "no marks"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--executor", "local"], "leave out --executor"),
        (["--max-model-len", "5"], "leave out --executor"),
        (["--rows", "0"], "--rows must be at least 1"),
        (["--clients", "0"], "--clients must be at least 1"),
        (["--time-scale", "1,2"], "one for each of 1 files"),
        (["--time-scale", "-1"], "--time-scale must be a number from 0"),
        (["--token-us", "nan"], "--token-us must be a number from 0"),
        (["--step-ms", "0"], "so that time passes"),
        (["--max-tokens", "9000", "--num-blocks-override", "20"], "needs 564 KV blocks"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traces", str(AZURE), *options]) == 1
    assert message in capsys.readouterr().err
