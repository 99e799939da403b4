"""/health of an engine that hangs: 503 while it does, without waiting for it, and 200 once it was replaced."""

import os
import signal
import time
import urllib.request

import numpy as np

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from ipc.params.sampling_params import SamplingParams
from tests.frontend.http.caller import serving, wait_for
from tests.test_readme import free_port

PATIENCE_S = 40.0
SLOW_STEPS = ("--executor", "fake", "--executor-option", "step_us=20000", "--hang-timeout", "0.5")


def test_health_tells_that_the_engine_hangs() -> None:
    metrics = f"127.0.0.1:{free_port()}"
    with serving(*SLOW_STEPS, "--metrics", metrics) as caller:
        client = EngineClient(ZmqTransport(caller.connect))
        number = client.submit([1, 2], SamplingParams(max_tokens=60, ignore_eos=True), seed=0)
        assert caller.get("/health").status == 200
        wait_for(lambda: len(client.read(number).token_ids) > 5)  # steps, so that their usual time is known
        pid = client.welcome.pid
        os.kill(pid, signal.SIGSTOP)
        begin, statuses, said = time.monotonic(), [200], ""
        while 503 not in statuses or statuses[-1] != 200:
            assert time.monotonic() - begin < PATIENCE_S, (statuses, said)
            asked = time.monotonic()
            answer = caller.get("/health")
            assert time.monotonic() - asked < 5.0, "a hung engine delays no answer"
            statuses.append(answer.status)
            said += answer.body.decode() if answer.status == 503 else ""
            time.sleep(0.02)
        assert "the engine hangs: its" in said
        client.wait(np.array([number]), PATIENCE_S)  # the stream goes on
        assert client.welcome.pid != pid
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as page:
            text = page.read().decode()
        assert 'engine_core_restarts_total{cause="hung"} 1.0' in text
        assert "engine_core_step_age_seconds 0.0" in text
        client.close()
