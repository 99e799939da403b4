"""An hour of faults, one a second, under streams that come and go: each is whole and exact, and nothing grows or stays.

`make soak` runs it; ENGINE_SOAK_S=60 makes it a minute. It prints what it did (pytest -s), every five minutes and at
its end. Nothing in it counts time: on a machine that others use the faults wait for an engine that can be struck.
"""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine import standby_plan
from frontend.engine.process import EngineProcess
from frontend.engine.standby_plan import StandbyKind
from frontend.engine.supervised_engine import SupervisedEngine
from frontend.engine.supervisor import State
from ipc.errors import EngineCoreError
from ipc.params.sampling_params import SamplingParams
from tests.fake_options import fake_options, with_options
from tests.frontend.engine.supervised import EAGER, FAKE, PATIENCE_S, undisturbed

SECONDS = float(os.environ.get("ENGINE_SOAK_S", "3600"))
NUM_STREAMS, SHORTEST, LONGEST = 64, 20, 800
PACED = with_options(FAKE, executor_options=fake_options(step_us=1000))
#: Faults and how often each is drawn.
FAULTS = {"KILL": 6, "SEGV": 3, "ABRT": 3, "STOP": 1, "standby KILL": 3, "standby STOP": 1, "upgrade": 2, "client": 3}
#: Deaths that lie in the work. Two in a row at the same positions are what a poison looks like, so they are kept apart.
CRASHES, APART_S = ("SEGV", "ABRT", "STOP"), 10.0
MAX_GROWTH_KIB = 32 << 10
#: Seconds after an engine was seen ready in which its successors are struck, in their starts too. Then one may start.
STRUCK_S = 5.0
LONG_S = 10 * PATIENCE_S  # more than a start takes on any machine
REPORT_S = 300.0


class Streams:
    """Streams of one client, always as many; those that end are compared and replaced."""

    def __init__(self, client: EngineClient, seed: int) -> None:
        self.client = client
        self.num_done = self.num_tokens = 0
        self._random = random.Random(seed)
        self._live: dict[int, tuple[list[int], int]] = {}

    def turn(self, num_wanted: int) -> bool:
        """Compare what has ended and submit as many; return whether any is left."""
        ended = [number for number in self._live if self.client.read(number).finish]
        for number in ended:
            prompt, length = self._live.pop(number)
            progress = self.client.read(number)
            assert progress.error is None, progress.error
            due = undisturbed(np.array([prompt]), length)[0]
            assert (progress.token_ids == due).all(), f"stream {number} differs"
            self.num_done, self.num_tokens = self.num_done + 1, self.num_tokens + length
        self.client.discard(ended)
        while len(self._live) < num_wanted:
            prompt = [self._random.randrange(1000) for _ in range(self._random.randint(1, 60))]
            length = self._random.randint(SHORTEST, LONGEST)
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            self._live[self.client.submit(prompt, params, seed=0)] = prompt, length
        return bool(self._live)


def strike(fault: str, engine: SupervisedEngine, owner: EngineClient) -> None:
    """Do what the fault is; nothing, where its victim is not there just now."""
    standby = engine.standby
    with contextlib.suppress(ProcessLookupError, EngineCoreError):
        if fault == "upgrade":
            owner.upgrade()
        elif fault == "client":
            visitor = EngineClient(ZmqTransport(engine.address), hello_timeout=5.0)
            for number in range(8):
                visitor.submit([number], SamplingParams(max_tokens=5000, ignore_eos=True), seed=0)
            visitor.close()
        elif not fault.startswith("standby "):
            os.kill(engine.process.pid, signal.Signals[f"SIG{fault}"])
        elif standby is not None:
            os.kill(standby.pid, signal.Signals[f"SIG{fault.removeprefix('standby ')}"])


def report(begin: float, streams: Streams, struck: Counter[str], engine: SupervisedEngine) -> None:
    """Print what was done so far."""
    print(
        f"\n{time.monotonic() - begin:.0f} s: {streams.num_done} streams of {streams.num_tokens} tokens, all exact; "
        f"{struck.total()} faults {dict(struck)}; "
        f"restarts { {cause.name: count for cause, count in engine.supervisor.restarts.items()} }; "
        f"{engine.supervisor.standby.num_taken} by a standby",
        flush=True,
    )


def anonymous_kib() -> int:
    """This process's memory without files, in KiB: the supervisor and the client."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "VmSwap")))


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 1500)
@pytest.mark.parametrize("seed", [1])
def test_an_hour_of_faults(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_plan, "_DELAYS_S", (0.1,))
    draw, struck, num_fds = random.Random(seed), Counter[str](), len(os.listdir("/proc/self/fd"))
    process = EngineProcess(PACED, listen=f"ipc://{tmp_path}/s", resume_s=LONG_S)
    engine = SupervisedEngine(process, EAGER, hang_s=0.5, standby=StandbyKind.MODEL)
    begin, settled_kib = time.monotonic(), 0
    try:
        engine.start()
        engine.wait_ready()
        client = EngineClient(ZmqTransport(engine.address))
        owner = EngineClient(ZmqTransport(engine.address), owner_token=process.owner_token)
        streams, next_fault, crashed_at = Streams(client, seed), begin + 1.0, 0.0
        seen_ready, next_report = begin, begin + REPORT_S
        while (now := time.monotonic()) < begin + SECONDS:
            streams.turn(NUM_STREAMS)
            if engine.supervisor.state is State.READY:
                seen_ready = now
            if now > next_report:
                report(begin, streams, struck, engine)
                next_report = now + REPORT_S
            if now > next_fault and now < seen_ready + STRUCK_S:
                fault = draw.choices(list(FAULTS), list(FAULTS.values()))[0]
                if fault in CRASHES:
                    fault, crashed_at = ("KILL", crashed_at) if now < crashed_at + APART_S else (fault, now)
                strike(fault, engine, owner)
                struck[fault] += 1
                next_fault = now + draw.uniform(0.1, 1.9)
            if not settled_kib and now > begin + SECONDS / 4:
                settled_kib = anonymous_kib()
            time.sleep(0.02)
        end = time.monotonic() + LONG_S
        while streams.turn(0):
            assert time.monotonic() < end, "streams hang"
            time.sleep(0.02)
        grown_kib = anonymous_kib() - settled_kib
        owner.close()
        client.close()
    finally:
        engine.close()
    report(begin, streams, struck, engine)
    print(f"memory grew by {grown_kib} KiB")
    assert grown_kib < MAX_GROWTH_KIB
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= num_fds
    assert engine.supervisor.standby.num_taken > 0
    assert set(struck) == set(FAULTS) or SECONDS < 120
