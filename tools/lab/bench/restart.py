"""The pause after an engine's death: from SIGKILL until streams continue, by phase.

Streams of a client that knows only the address; the pause of a stream ends with its next token. The engine is killed
repeatedly, each time after all streams have continued: without a standby, and with a ready one of each kind.
"""

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from core.executors.fake_options import read_fake_options, with_fake_options
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from frontend.engine.restart_policy import RestartRules
from frontend.engine.standby_plan import StandbyKind, StandbyState
from frontend.engine.supervised_engine import SupervisedEngine
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.version import NAME, VERSION
from tools.commands.replay.latency import percentile

_NUM_KILLS = 12
_NUM_STREAMS = 8
_PROMPT = 32
_RUN_S = 0.3  # between the end of a pause and the next kill
_LIMIT_S = 60.0


def measure_restart(config: EngineConfig, *, rep: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each kind of standby: pauses in ms, and how long after the kill the engine was ready."""
    for kind in StandbyKind:
        yield measure_kind(config, kind, rep=rep)


def measure_kind(config: EngineConfig, kind: StandbyKind, *, rep: int, num_kills: int = _NUM_KILLS) -> dict[str, Any]:
    """Return the record of one kind of standby."""
    if not read_fake_options(config).step_us:
        config = with_fake_options(config, step_us=1000, max_model_len=1_000_000)
    with tempfile.TemporaryDirectory(prefix="engine-core-bench-") as folder:
        process = EngineProcess(config, listen=f"ipc://{folder}/s", resume_s=_LIMIT_S)
        news: list[float] = []
        rules = RestartRules(most=num_kills + 1, delays_s=(0.0,))
        engine = SupervisedEngine(process, rules, standby=kind, on_news=lambda _: news.append(time.monotonic()))
        try:
            engine.start()
            engine.wait_ready()
            client = EngineClient(ZmqTransport(engine.address))
            try:
                rounds = [_kill_once(engine, client, news, kind) for _ in range(num_kills)]
            finally:
                client.close()
        finally:
            engine.close()
    names = {"engine": NAME, "version": VERSION, "workload": "restart", "rep": rep, "executor": config.executor}
    return {**names, "standby": kind.value, "kills": num_kills, "streams": _NUM_STREAMS, **_summary(rounds)}


def _kill_once(
    engine: SupervisedEngine, client: EngineClient, news: list[float], kind: StandbyKind
) -> dict[str, float]:
    """Kill the engine under streams; return seconds until noticed, ready, first stream, last stream."""
    length = client.welcome.limits.max_model_len - _PROMPT
    params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)
    numbers = [client.submit([number + 5] * _PROMPT, params, seed=0) for number in range(_NUM_STREAMS)]

    def lengths() -> list[int]:
        return [len(client.read(number).token_ids) for number in numbers]

    _wait(lambda: min(lengths()) > 0)
    if kind is not StandbyKind.NO:
        _wait(lambda: engine.supervisor.standby.state is StandbyState.PREPARED)
    time.sleep(_RUN_S)
    news.clear()
    epoch = client.welcome.epoch
    begin = time.monotonic()
    os.kill(engine.process.pid, signal.SIGKILL)
    _wait(lambda: client.welcome.epoch > epoch)
    seen = lengths()
    times: list[float] = []
    _wait(lambda: _note(times, sum(now > before for now, before in zip(lengths(), seen, strict=True))))
    client.abort(numbers)
    client.discard(numbers)
    _wait(lambda: len(news) == 2)
    first, last = times[0] - begin, times[-1] - begin
    return {"noticed": news[0] - begin, "ready": news[1] - begin, "first": first, "last": last}


def _note(times: list[float], num_moving: int) -> bool:
    """Note the time once for each stream that has continued; return whether all have."""
    times += [time.monotonic()] * (num_moving - len(times))
    return len(times) == _NUM_STREAMS


def _wait(is_over: Callable[[], bool]) -> None:
    end = time.monotonic() + _LIMIT_S
    while not is_over():
        if time.monotonic() > end:
            raise TimeoutError(f"the engine did not come back within {_LIMIT_S:g} s")
        time.sleep(0.001)


def _summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    found = {}
    for name in ("noticed", "ready", "first", "last"):
        values = [one[name] * 1000 for one in rounds]
        found[f"{name}_ms_p50"] = round(statistics.median(values), 1)
        found[f"{name}_ms_max"] = round(percentile(values, 1.0), 1)
    return found
