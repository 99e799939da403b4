"""EngineProcess: what it starts is ready or gone, dies with its owner, and leaves nothing."""

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from frontend.engine.child import spawn
from frontend.engine.process import EngineProcess
from ipc.errors import AddressError, ConfigError, EngineStartError, ModelFileError, OutOfMemoryError
from ipc.options.config import EngineConfig
from ipc.wire.messages import EngineStopping, Outputs
from ipc.wire.start_messages import Start
from tests.fake_options import fake_options
from tests.placed import PREFIX, placed
from tests.preloaded.start import EXEC
from tests.raw_client import PATIENCE_S, RawClient

ROOT = Path(__file__).resolve().parents[3]
FAKE = EngineConfig(executor="fake", executor_options=fake_options(vocab_size=1000))

#: An owner that prints its engine's pid and address and waits to be killed. No main guard.
OWNER = """
import sys, time
from frontend.engine.process import EngineProcess
from ipc.options.config import EngineConfig
engine = EngineProcess(EngineConfig(executor="fake"))
engine.start()
if "ready" in sys.argv:
    engine.wait_ready()
print(engine.pid, flush=True)
{rest}
time.sleep(60)
"""


def run_owner(*arguments: str, rest: str = "", cwd: Path | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", placed(OWNER.format(rest=rest)), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=cwd)


def read_line(owner: subprocess.Popen[str]) -> str:
    assert owner.stdout is not None
    return owner.stdout.readline()


def end(owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.wait()
    assert owner.stdout is not None
    owner.stdout.close()


def is_gone(pidfd: int, timeout: float) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    gone = bool(poller.poll(timeout * 1000))
    os.close(pidfd)
    return gone


def freeze(pid: int) -> None:
    """A stopped process notices nothing, not even the end of its lease."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


def private_files() -> list[str]:
    return sorted(str(path) for path in Path(os.environ["TMPDIR"]).rglob("engine-core-*"))


@pytest.fixture
def endless_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine that never gets further than to start Python: a real one may be ready before this process goes on."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.usefixtures("endless_start")
def test_a_process_that_is_stopped_while_it_starts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LIMIT_S", 0.2), ("LOOK_S", 0.05)):
        monkeypatch.setattr(f"{PREFIX}frontend.engine.process.{name}", seconds)
    process = EngineProcess(EngineConfig(executor="fake"))
    process.start()
    pid = process.pid
    freeze(pid)
    with pytest.raises(EngineStartError, match=rf"\({pid}\) was stopped by a signal in phase"):
        process.wait_ready()
    assert not Path(f"/proc/{pid}").exists()


def test_start_and_stop() -> None:
    before = private_files()
    phases: list[tuple[str, float]] = []
    engine = EngineProcess(FAKE, on_phase=lambda name, seconds: phases.append((name, seconds)))
    with pytest.raises(EngineStartError, match="has not been started"):
        _ = engine.pid
    engine.start()
    with pytest.raises(EngineStartError, match="was already started"):
        engine.start()
    with pytest.raises(EngineStartError, match="before wait_ready"):
        _ = engine.address
    engine.wait_ready()
    engine.wait_ready()  # at once
    assert [name for name, _ in phases] == ["listen", "read tokenizer", "import", "load model", "kv cache"]
    assert 0.0 < phases[0][1] <= phases[-1][1] < PATIENCE_S
    assert engine.exit_code is None
    assert "is running" in engine.describe_exit()
    pid, pidfd = engine.pid, os.dup(engine.pidfd)
    engine.stop()
    assert is_gone(pidfd, 0)
    assert engine.describe_exit() == f"the engine process ({pid}) exited with code 0"
    engine.close()
    engine.close()
    assert engine.describe_exit() == f"the engine process ({pid}) exited with code 0"
    assert private_files() == before


def test_listen_on_a_tcp_port() -> None:
    with EngineProcess(FAKE, listen="tcp://127.0.0.1:0") as engine, RawClient(engine.address) as client:
        assert engine.address.startswith("tcp://127.0.0.1:")
        assert not engine.address.endswith(":0")
        assert client.welcome.epoch == 0


@pytest.mark.parametrize(
    ("config", "kind", "text"),
    [
        (
            EngineConfig(model="/no/such/model"),
            ModelFileError,
            "'/no/such/model' is not a file or folder on this machine",
        ),
        (
            EngineConfig(executor="fake", executor_options=fake_options(max_model_len=100), max_model_len=101),
            ConfigError,
            "max_model_len=101 is more than the 100 tokens",
        ),
        (
            EngineConfig(executor="fake", max_model_len=1000, num_blocks_override=10),
            OutOfMemoryError,
            "set max_model_len to at most 144",
        ),
    ],
)
def test_start_failure_is_the_engines_own_error(config: EngineConfig, kind: type[Exception], text: str) -> None:
    engine = EngineProcess(config)
    engine.start()
    with pytest.raises(kind) as caught:
        engine.wait_ready()
    assert text in str(caught.value)
    assert engine.describe_exit().endswith("exited with code 2")


def test_address_in_use_by_a_live_engine() -> None:
    with EngineProcess(FAKE) as first, RawClient(first.address) as client:
        second = EngineProcess(FAKE, listen=first.address)
        second.start()
        with pytest.raises(AddressError, match=f"in use by a live engine, process {first.pid}"):
            second.wait_ready()
        client.add(1, [1])
        client.finish(1)  # the first one has lost nothing


@pytest.mark.parametrize("is_early", [True, False])
def test_a_users_directory_stays(is_early: bool) -> None:
    folder = Path(os.environ["TMPDIR"]) / "engine-core-mine"
    folder.mkdir()
    engine = EngineProcess(FAKE, listen=f"ipc://{folder}/s")
    engine.start()
    if not is_early:
        engine.wait_ready()
    engine.close()
    assert list(folder.iterdir()) == []
    folder.rmdir()


def test_bad_address_is_known_before_anything_starts() -> None:
    with pytest.raises(AddressError, match="so it needs keys"):
        EngineProcess(FAKE, listen="tcp://0.0.0.0:5000")


@pytest.mark.usefixtures("endless_start")
def test_killed_while_starting() -> None:
    engine = EngineProcess(FAKE)
    engine.start()
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineStartError, match="was killed by SIGKILL while in phase 'start of Python'"):
        engine.wait_ready()
    assert engine.describe_exit().endswith("was killed by SIGKILL")


@pytest.mark.usefixtures("endless_start")
def test_start_timeout_names_the_phase_and_ends_the_process() -> None:
    engine = EngineProcess(FAKE, start_timeout=0.2)
    engine.start()
    freeze(engine.pid)
    pidfd = os.dup(engine.pidfd)
    began = time.monotonic()
    with pytest.raises(EngineStartError, match=r"not ready within start_timeout=0\.2 seconds; it was in phase '.+'"):
        engine.wait_ready()
    assert time.monotonic() - began < 20.0
    assert is_gone(pidfd, 0)


def test_child_that_is_no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport os, sys\nos.write(int(sys.argv[-1]), b'not a frame')\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(EngineStartError, match="does not follow an engine's protocol"), EngineProcess(FAKE):
        pass
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(EngineStartError, match="could not be started"):
        EngineProcess(FAKE).start()


def test_killed_while_idle_then_started_again() -> None:
    with EngineProcess(FAKE) as engine:
        pidfd = os.dup(engine.pidfd)
        os.kill(engine.pid, signal.SIGKILL)
        assert is_gone(pidfd, PATIENCE_S)
        assert engine.describe_exit().endswith("was killed by SIGKILL")
        assert engine.exit_code == -signal.SIGKILL
        engine.drain()  # nothing to tell, no error
        engine.close()
        engine.start()
        engine.wait_ready()
        with RawClient(engine.address) as client:
            assert client.welcome.epoch == engine.epoch == 1
            client.add(1, [1])
            message = client.receive(Outputs)
            assert message.epoch == 1
            client.finish(1)


def test_drain_finishes_what_runs() -> None:
    with EngineProcess(FAKE) as engine, RawClient(engine.address) as client:
        client.add(1, [1], max_tokens=3000)
        client.receive(Outputs)
        engine.drain()
        assert len(client.finish(1)[0]) == 3000
        assert client.receive(EngineStopping).error == ""
        assert engine.wait(PATIENCE_S)
        assert engine.describe_exit().endswith("exited with code 0")


def test_stop_kills_what_hangs() -> None:
    with EngineProcess(FAKE) as engine:
        freeze(engine.pid)
        engine.stop(timeout=0.1)
        assert engine.describe_exit().endswith("was killed by SIGKILL")


@pytest.mark.parametrize("moment", ["starting", "ready"])
def test_engine_dies_with_its_owner(moment: str, tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()  # another package of that name in the working directory
    (tmp_path / "core" / "__init__.py").write_text("raise SystemExit('wrong core')")
    before = private_files()
    owner = run_owner(moment, cwd=tmp_path)
    pidfd = os.pidfd_open(int(read_line(owner)))
    end(owner)
    assert is_gone(pidfd, PATIENCE_S)
    assert private_files() == before


def test_fork_of_the_owner_neither_ends_nor_keeps_the_engine() -> None:
    fork = """
import os
if not (child := os.fork()):
    sys.exit()
os.waitpid(child, 0)
print(engine.exit_code is None and os.path.exists(engine.address[6:]), flush=True)
if not os.fork():
    print(os.getpid(), flush=True)
    time.sleep(60)
"""
    owner = run_owner("ready", rest=fork)
    pidfd = os.pidfd_open(int(read_line(owner)))
    assert read_line(owner) == "True\n"
    fork_pid = int(read_line(owner))
    owner.kill()
    try:
        assert is_gone(pidfd, PATIENCE_S)
    finally:
        os.kill(fork_pid, signal.SIGKILL)
        end(owner)


def test_forgotten_engine_ends() -> None:
    before = private_files()
    engine = EngineProcess(FAKE)
    engine.start()
    engine.wait_ready()
    pidfd = os.dup(engine.pidfd)
    del engine
    gc.collect()
    assert is_gone(pidfd, PATIENCE_S)
    assert private_files() == before


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cycles", [4, pytest.param(1_000, marks=pytest.mark.soak)])
def test_nothing_leaks(cycles: int) -> None:
    def held() -> tuple[object, ...]:
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
        files = sorted(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm"))
        return *files, threading.active_count(), private_files(), children

    gc.collect()
    before = held()
    for _ in range(cycles):
        with EngineProcess(FAKE) as engine, RawClient(engine.address) as client:
            client.add(1, [1])
            client.finish(1)
    gc.collect()
    assert held() == before


@pytest.mark.checkout  # an installed wheel needs no PYTHONPATH
def test_environment_of_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv(EXEC, "1")  # the system shows the environment of a program's start
    engine = EngineProcess(EngineConfig(executor="fake", threads=3))
    with engine:
        entries = Path(f"/proc/{engine.pid}/environ").read_bytes().decode().split("\0")
    for entry in ("GOMP_SPINCOUNT=77", "OMP_NUM_THREADS=3", "THP_MEM_ALLOC_ENABLE=1", f"PYTHONPATH={ROOT}:/elsewhere"):
        assert entry in entries


@pytest.mark.parametrize("closed", ["0", "1", "2", "0, 1, 2"])
def test_owner_with_closed_standard_streams(closed: str) -> None:
    code = f"""
import os
from frontend.engine.process import EngineProcess
from ipc.options.config import EngineConfig
for fd in ({closed},):
    os.close(fd)
with EngineProcess(EngineConfig(executor="fake")) as engine:
    assert engine.exit_code is None
    engine.drain()
    engine.wait()
    os._exit(0 if engine.describe_exit().endswith("code 0") else 3)
"""
    command = [sys.executable, "-c", placed(code)]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0


def test_start_that_no_pipe_can_hold_is_refused_at_once() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(EngineStartError, match="too long for a pipe: shorten them"):
        spawn("core", Start(FAKE, "ipc:///" + "a" * 100_000))
    assert os.listdir("/proc/self/fd") == before


def run_python(code: str, *path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-P", "-c", placed(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout + done.stderr


def test_owner_imports_nothing_of_the_engine() -> None:
    code = (
        "import sys, frontend.engine.process\n"
        f"print({{'torch', '{PREFIX}core', '{PREFIX}kernels', 'transformers', 'multiprocessing'}} & sys.modules.keys())"
    )
    assert run_python(code, ROOT) == "set()\n"


@pytest.mark.checkout  # an installed wheel has one name
def test_clash_of_package_names_says_what_to_do(tmp_path: Path) -> None:
    code = "from core.__main__ import check_packages; check_packages(); print('good')"
    assert run_python(code, ROOT) == "good\n"
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise SystemExit('not imported')")
    text = run_python(code, tmp_path, ROOT)
    assert f"'kernels' that Python finds ({tmp_path}/kernels/__init__.py) is not the engine's own" in text
    assert "pip uninstall kernels" in text


def test_the_owners_token_is_in_no_argument_and_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXEC, "1")
    with EngineProcess(FAKE) as engine:
        token = engine.owner_token
        for name in ("cmdline", "environ"):
            seen = Path(f"/proc/{engine.pid}/{name}").read_bytes()
            assert token not in seen
            assert token.hex().encode() not in seen
