"""Engines that hang, and requests that kill them: found, replaced and refused; everybody else goes on."""

import math
import signal
from pathlib import Path

import numpy as np
import pytest

from frontend.client.client import EngineClient
from frontend.engine.death import Cause
from frontend.engine.supervised_engine import Watchdog
from ipc.errors import RequestFailedError
from ipc.params.sampling_params import SamplingParams
from tests.fake_options import fake_options, with_options
from tests.frontend.engine.supervised import FAKE, check, connected, finish, kill, submit, supervised, undisturbed


def test_a_stopped_engine_is_found_and_replaced(tmp_path: Path) -> None:
    """SIGSTOP in a step; the limit is shortened, so that the test is."""
    news: list[str] = []
    with supervised(FAKE, listen=f"ipc://{tmp_path}/s") as engine:
        engine.watchdog, engine._on_news = Watchdog(0.5), news.append
        client = connected(engine)
        numbers = submit(client)
        client.wait(np.array(numbers), 0.1)
        kill(engine.process, signal.SIGSTOP)
        check(client, numbers)
        assert client.welcome.epoch == 1
        assert engine.last_cause is Cause.HUNG
        assert "hangs: its" in news[0]
        client.close()


def test_a_hang_in_the_very_first_step_is_found(tmp_path: Path) -> None:
    """The warm-up says how long a step may take before any has run."""
    with supervised(
        with_options(FAKE, executor_options=fake_options(poison="hang:5:0")), listen=f"ipc://{tmp_path}/s"
    ) as engine:
        engine.watchdog = Watchdog(0.5)
        client = connected(engine)
        assert "(QUARANTINED)" in str(failure(client, [5, 7]))
        assert engine.last_cause is Cause.HUNG
        client.close()


SOAK = (pytest.mark.soak, pytest.mark.timeout(300))
KINDS = ("raise", "abort", "segv", "memory", "hang")


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("segv", 6),
        *(pytest.param(kind, count, marks=SOAK) for kind in KINDS for count in (8, 17, 33, 64)),
    ],
)
def test_a_poison_fails_alone(kind: str, count: int, tmp_path: Path) -> None:
    """Streams in lockstep with it: all of them are suspects."""
    config = with_options(FAKE, executor_options=fake_options(poison=f"{kind}:5:40"), max_num_seqs=count)
    with supervised(config, listen=f"ipc://{tmp_path}/s") as engine:
        engine.watchdog = Watchdog(0.5)
        client = connected(engine)
        numbers = submit(client, count, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        finish(client, numbers)
        assert client.read(numbers[5]).token_ids.tolist() == undisturbed(np.array([[5, 7]]), 38)[0].tolist()
        error = client.read(numbers[5]).error
        assert isinstance(error, RequestFailedError)
        assert "(QUARANTINED)" in str(error)
        check(client, numbers[:5] + numbers[6:], 200)
        assert engine.supervisor.num_deaths <= math.ceil(math.log2(count)) + 2
        assert "(QUARANTINED)" in str(failure(client, [5, 7])), "and it does not come again"
        print(f"\n{kind} among {count}: {engine.supervisor.num_deaths} deaths")
        client.close()


def failure(client: EngineClient, prompt: list[int]) -> Exception | None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    number = client.submit(prompt, params, seed=0)
    finish(client, [number])
    return client.read(number).error


def test_a_row_that_fails_is_no_death(tmp_path: Path) -> None:
    with supervised(
        with_options(FAKE, executor_options=fake_options(poison="row:5:40")), listen=f"ipc://{tmp_path}/s"
    ) as engine:
        client = connected(engine)
        numbers = submit(client, 12)
        finish(client, numbers)
        assert "the request is poisoned" in str(client.read(numbers[5]).error)
        check(client, numbers[:5] + numbers[6:])
        assert engine.supervisor.num_deaths == 0
        client.close()
