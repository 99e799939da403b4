"""How well a forecast predicts the held-out half of a real run of the engine: 99 % of first tokens, and the bars.

A run is REQUESTS requests at an open rate, sent through `engine-core record` to an engine and its HTTP server in
processes of their own. The rate is a part of what the engine of this machine serves of the same requests at once. The
first half of the capture and of what was recorded is what the forecast is made of, and the second half is compared
with it. A machine that is busy with other work in one half only cannot be predicted: foreign_cpu_s tells.
"""

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from core.capture.file import CaptureFile
from ipc.errors import ConfigError, EngineStartError
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options
from ipc.version import NAME, VERSION
from tools.commands.http import check_installed
from tools.commands.replay.rerun import replay_config
from tools.commands.replay.what_if.recording import read_recording
from tools.lab.bench.quiet import cpu_use, foreign_cpu
from tools.lab.bench.workloads import HOST_ID_SPAN, ID_LOW
from tools.lab.forecast.forecast import NUM_RUNS, forecast, measure, observed, requests_of, windows
from tools.lab.forecast.rehearsal import request_body, send_all, serving
from tools.lab.traces.formats import read_trace
from tools.lab.traces.row import Row, Trace
from tools.lab.traces.workload import make_workload

REQUESTS = 2000
PILOT = 64  # requests at once, which show what the engine serves
_LOAD = 0.6  # the rate, as a part of that
_MAX_MODEL_LEN = 1024
_SHARED = 96  # tokens that a third of the prompts of workload `shared` have in common
_KINDS = ("poisson", "bursts", "shared")


def measure_forecast_error(
    options: dict[str, Any], *, rounds: int, files: Sequence[Path] = ()
) -> Iterator[dict[str, Any]]:
    """Yield a record for each workload and round. files: traces, whose requests and order of arrival are taken in place
    of the three workloads; their lengths are scaled to the engine's. Errors: ConfigError; those of a start.
    """
    check_installed()
    config = config_from_options(**{"max_model_len": _MAX_MODEL_LEN, **options})
    assert config.max_model_len is not None
    for round_ in range(rounds):
        for name in [*map(str, files)] or _KINDS:
            if files:
                bodies, arrivals = _of_trace(read_trace(Path(name), REQUESTS), config.max_model_len)
            else:
                bodies, arrivals = made_up(name, round_)
            with tempfile.TemporaryDirectory(prefix="engine-core-bench-") as folder:
                record = _measure(config, Path(folder), bodies, arrivals)
            names = {"engine": NAME, "version": VERSION, "workload": "forecast-error", "case": name, "round": round_}
            yield {**names, "dtype": config.dtype, **record}


def made_up(kind: str, round_: int) -> tuple[list[bytes], list[float]]:
    """Return bodies, and arrivals with a mean gap of 1."""
    draw, now, bodies, arrivals = random.Random(f"{kind} {round_}"), 0.0, list[bytes](), list[float]()
    shared = [ID_LOW + place for place in range(_SHARED)]
    for number in range(REQUESTS):
        length = min(600, 8 + round(draw.lognormvariate(4.4, 0.8)))
        prompt = [ID_LOW + draw.randrange(HOST_ID_SPAN) for _ in range(length)]
        if kind == "shared" and number % 3 == 0:
            prompt = shared + prompt
        bodies.append(
            request_body(np.array(prompt, "<i4").tobytes(), min(200, 4 + round(draw.lognormvariate(3.2, 0.7))))
        )
        now += draw.gammavariate(0.3, 1 / 0.3) if kind == "bursts" else draw.expovariate(1)
        arrivals.append(now)
    return bodies, arrivals


def _of_trace(trace: Trace, max_tokens: int) -> tuple[list[bytes], list[float]]:
    """Return the same of a trace's rows."""
    rows: list[Row] = trace.rows
    if len(rows) < 2 * PILOT or rows[-1].arrival_s <= rows[0].arrival_s:
        raise ConfigError(f"{trace.name} has too few requests with times: at least {2 * PILOT} are needed")
    made = make_workload(trace, max_tokens=max_tokens, time_scale=1.0, num_clients=1, vocab_size=HOST_ID_SPAN)
    messages = [one.message for one in made.requests]
    bodies = [request_body(one.prompt_token_ids, one.params.max_tokens or 1) for one in messages]
    gap_s = (rows[-1].arrival_s - rows[0].arrival_s) / (len(rows) - 1)
    return bodies, [(row.arrival_s - rows[0].arrival_s) / gap_s for row in rows]


def _measure(config: EngineConfig, folder: Path, bodies: list[bytes], arrivals: list[float]) -> dict[str, Any]:
    gap_s = _pilot(config, bodies[:PILOT]) / _LOAD
    capture, traffic = folder / "run.cap", folder / "run.jsonl"
    before = cpu_use()
    captured = msgspec.structs.replace(config, capture=str(capture))
    with serving(captured) as (host, port), _Recorder(f"http://{host}:{port}", traffic) as proxy:
        uvloop.run(send_all(proxy.address, bodies, [gap_s * arrival for arrival in arrivals]))
    foreign_s = foreign_cpu(before, cpu_use())
    return {"requests": len(bodies), "gap_ms": round(gap_s * 1000, 1), **_compared(capture, traffic)} | {
        "foreign_cpu_s": round(foreign_s, 1)
    }


def _pilot(config: EngineConfig, bodies: list[bytes]) -> float:
    """Return the seconds that a request takes of the engine if many are there at once."""
    with serving(config) as address:
        uvloop.run(send_all(address, bodies, [0.0] * len(bodies)))  # the first time is slower
        begin = time.monotonic()
        uvloop.run(send_all(address, [body.replace(b"[", b"[7,", 1) for body in bodies], [0.0] * len(bodies)))
        return (time.monotonic() - begin) / len(bodies)


class _Recorder:
    """`engine-core record` in front of a server. Errors: EngineStartError."""

    def __init__(self, upstream: str, output: Path) -> None:
        command = [sys.executable, "-m", "engine_core", "record", "--upstream", upstream, "--output", str(output)]
        self._process = subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "recording at http://" not in line:
            self._process.kill()
            raise EngineStartError(f"`engine-core record` did not start: {line.strip() or 'see its standard error'}")
        self.address = "127.0.0.1", int(line.split("recording at http://")[1].split()[0].rsplit(":", 1)[1])

    def __enter__(self) -> "_Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _compared(capture: Path, traffic: Path) -> dict[str, Any]:
    """Return the prediction of the second half next to what was seen."""
    file, trace = CaptureFile(capture), read_trace(traffic)
    recording, seen, half = read_recording(file), observed(trace), len(trace.rows) // 2
    config, info = replay_config(file.header), file.header.model
    engine = measure(config, info, recording, seen, num_requests=half)
    found = forecast(engine, requests_of(trace, engine.config, engine.info), NUM_RUNS)
    count = len(trace.rows)
    predicted, real = [run.outcome.part(half, count).figures() for run in found.runs], seen.part(half, count).figures()
    figures: dict[str, Any] = {"held_out": count - half, "skipped": trace.num_skipped}
    for name in ("ttft_mean", "ttft_p99", "tpot_mean", "e2e_p99", "tokens_per_s"):
        middle = float(np.mean([one[name] for one in predicted]))
        figures |= {f"{name}_seen": round(real[name], 2), f"{name}_forecast": round(middle, 2)}
        figures[f"{name}_error"] = round(middle / real[name] - 1, 4)
    for name in ("ttft", "tpot"):
        inside, known = found.bars(name, half).covers(windows(getattr(seen, name)[half:]))
        figures |= {f"{name}_windows": known, f"{name}_windows_covered": inside}
    return figures
