"""Standby: a second process that takes over when the engine dies, and whose own deaths nobody notices."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine import standby as standby_module
from frontend.engine import standby_plan
from frontend.engine.process import EngineProcess
from frontend.engine.standby import Standby
from frontend.engine.standby_plan import StandbyKind, StandbyState
from frontend.engine.supervised_engine import SupervisedEngine
from ipc.errors import EngineStartError
from ipc.options.config import EngineConfig
from ipc.wire.start_messages import Start
from tests.frontend.engine.supervised import FAKE, PATIENCE_S, check, connected, kill, submit, supervised
from tools.cli import main as run_cli


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_plan, "_AFTER_S", 0.0)


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def name_of(number: int) -> str:
    return signal.Signals(number).name


def prepared(engine: SupervisedEngine) -> int:
    """The standby's process, once it waits."""
    wait_until(lambda: engine.supervisor.standby.state is StandbyState.PREPARED)
    assert engine.standby is not None
    return engine.standby.pid


def flight_recorders() -> list[str]:
    """The descriptors of this process that are engines' flight recorders."""
    links = [str(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return [link for link in links if os.path.lexists(link) and "engine-core-flight" in os.readlink(link)]


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    "kind", [pytest.param(StandbyKind.IMPORT, marks=SOAK), StandbyKind.MODEL], ids=lambda kind: str(kind.value)
)
def test_it_takes_over_and_every_stream_goes_on(kind: StandbyKind, tmp_path: Path) -> None:
    before = flight_recorders()
    with supervised(FAKE, standby=kind, listen=f"ipc://{tmp_path}/s") as engine:
        client = connected(engine)
        pids = [engine.process.pid, prepared(engine)]
        assert Path(f"/proc/{pids[1]}/oom_score_adj").read_text() == "1000\n", "the kernel takes it first"
        numbers = submit(client)
        client.wait(np.array(numbers), 0.1)
        kill(engine.process)
        check(client, numbers)
        assert (client.welcome.epoch, client.welcome.pid) == (1, pids[1])
        assert Path(f"/proc/{pids[1]}/oom_score_adj").read_text() == Path("/proc/self/oom_score_adj").read_text()
        assert prepared(engine) not in pids, "and the next one is made"
        client.close()
    assert flight_recorders() == before, "one that is not needed any more keeps nothing"


@SOAK
def test_it_takes_over_at_a_private_address() -> None:
    """Of an engine without `listen`: each process has an address of its own, made and removed by its owner."""
    with supervised(FAKE, standby=StandbyKind.MODEL) as engine:
        client = EngineClient(ZmqTransport(engine.address, locate=engine.locate))
        pid, before = prepared(engine), engine.address
        numbers = submit(client)
        client.wait(np.array(numbers), 0.1)
        kill(engine.process)
        check(client, numbers)
        assert client.welcome.pid == pid
        after = engine.address
        assert after != before
        client.close()
    assert not Path(after.removeprefix("ipc://")).parent.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=SOAK)], ids=name_of)
def test_its_death_is_noticed_by_nobody_and_it_is_made_again(number: int, tmp_path: Path) -> None:
    with supervised(FAKE, standby=StandbyKind.MODEL, listen=f"ipc://{tmp_path}/s") as engine:
        client = connected(engine)
        numbers = submit(client)
        pid = prepared(engine)
        os.kill(pid, number)
        wait_until(lambda: engine.supervisor.standby.state is not StandbyState.PREPARED)
        assert prepared(engine) != pid
        check(client, numbers)
        assert (client.welcome.epoch, engine.supervisor.num_deaths) == (0, 0)
        client.close()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=SOAK), signal.SIGSTOP], ids=name_of)
def test_one_that_does_not_take_over_costs_a_moment(number: int, tmp_path: Path) -> None:
    """It dies or stops together with the engine: a new process is started, and it counts as one restart."""
    with supervised(FAKE, standby=StandbyKind.MODEL, listen=f"ipc://{tmp_path}/s") as engine:
        client = connected(engine)
        pid = prepared(engine)
        numbers = submit(client)
        client.wait(np.array(numbers), 0.1)
        os.kill(pid, number)
        kill(engine.process)
        check(client, numbers)
        assert client.welcome.pid != pid
        assert sum(engine.supervisor.restarts.values()) == 1
        client.close()


@SOAK
def test_an_upgrade_does_not_take_it(tmp_path: Path) -> None:
    """It was prepared from the code and the files before."""
    with supervised(FAKE, standby=StandbyKind.MODEL, listen=f"ipc://{tmp_path}/s") as engine:
        owner = EngineClient(ZmqTransport(engine.address), owner_token=engine.process.owner_token)
        pid = prepared(engine)
        owner.upgrade()
        wait_until(lambda: owner.welcome.epoch == 1)
        assert owner.welcome.pid != pid
        assert prepared(engine) != pid
        owner.close()


def test_what_cannot_be_prepared_says_why() -> None:
    config = EngineConfig(executor="local", model="/nowhere/at/all")
    standby = Standby(config, [], None, 60.0, loads_model=True)
    wait_until(lambda: not standby.look(time.monotonic()))
    assert standby.text.startswith("failed to prepare: ")
    assert standby.fds == ()
    with pytest.raises(EngineStartError, match="the standby failed to prepare"):
        standby.take(Start(config, "ipc:///tmp/x"))


def test_one_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_module, "_is_readable", lambda fd: False)  # it has reported nothing yet
    standby = Standby(FAKE, [], None, 0.0, loads_model=True)
    assert not standby.look(time.monotonic() + 1.0)
    assert standby.text == "was not ready in time"


@SOAK
def test_a_process_started_with_a_standby_answers_as_any() -> None:
    """Without a supervisor, for programs that do their own."""
    process = EngineProcess(FAKE)
    with process:
        standby = process.prepare_next(loads_model=True)
        wait_until(lambda: standby.look(time.monotonic()) and standby.is_prepared)
        process.close()
        process.start(standby)
        process.wait_ready()
        client = EngineClient(ZmqTransport(process.address))
        check(client, submit(client, 2))
        client.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--standby", "import", "--restarts", "0"), "--standby import is for restarts, and --restarts 0 allows none"),
        (("--standby", "model", "--device", "cuda"), "use --standby import"),
    ],
    ids=["no restarts", "a GPU"],
)
def test_a_standby_that_cannot_be_is_refused(
    options: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["serve", "--listen", f"ipc://{tmp_path}/s", "--owner-file", f"{tmp_path}/owner", *options]) != 0
    assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "nothing is left of it"
