"""`engine-core bench forecast-error`: a real run of a paced engine behind the proxy. No test looks at a time's size."""

import json
from pathlib import Path

import numpy as np
import pytest

from ipc.errors import ConfigError
from ipc.files.model_files import resolve_model
from tools.lab.bench import forecast_error
from tools.lab.bench.__main__ import main

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = [f"2023-11-16 18:15:{number:02}.0000000,{40 + number},{20 + number % 5}\n" for number in range(20)]


def test_the_second_half_of_a_run_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forecast_error, "PILOT", 8)
    monkeypatch.setattr(forecast_error, "NUM_RUNS", 2)
    path = tmp_path / "day.csv"
    path.write_text(HEADER + "".join(ROWS[:15]))
    command = ["forecast-error", "-m", str(resolve_model(None)), "--executor", "fake", "--workload", str(path)]
    for option in ("step_us=500", "vocab_size=49152", "max_model_len=4096"):
        command += ["--executor-options", option]
    with pytest.raises(ConfigError, match="at least 16 are needed"):
        main(command)
    path.write_text(HEADER + "".join(ROWS))
    assert main(command) == 0
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (record["case"], record["requests"], record["held_out"], record["skipped"]) == (str(path), 20, 10, 0)
    assert (record["ttft_windows"], record["tpot_windows"]) == (1, 1)
    error = record["ttft_p99_forecast"] / record["ttft_p99_seen"] - 1
    assert record["ttft_p99_error"] == pytest.approx(error, abs=0.01)


@pytest.mark.parametrize("kind", ["poisson", "bursts", "shared"])
def test_made_up_workloads(kind: str) -> None:
    bodies, arrivals = forecast_error.made_up(kind, 0)
    assert len(bodies) == len(arrivals) == forecast_error.REQUESTS
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1.0, rel=0.15)
    assert (gaps.std() > 1.5) == (kind == "bursts")
    prompts = [json.loads(body)["prompt"] for body in bodies]
    assert sum(prompt[:96] == prompts[0][:96] for prompt in prompts) == (
        len(prompts) // 3 + 1 if kind == "shared" else 1
    )
    assert forecast_error.made_up(kind, 1)[0] != bodies
