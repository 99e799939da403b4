"""Workers on several machines: answers with every bit of one process, whatever machine or network fails.

A machine is a process with a working folder of its own, which shares no descriptor and no memory with the engine's. It
comes over tcp.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core.workers import node_messages, nodes, step_clock
from core.workers.executor import WorkersExecutor
from core.workers.wires import block_stream_of, ends_of_streams, make_wires, places_of
from frontend.engine.process import EngineProcess
from ipc.errors import ConfigError, EngineStartError
from ipc.keys.curve import add_client, make_engine_keys
from ipc.machine.child_process import child_environment
from ipc.options.config import EngineConfig
from ipc.options.workers import in_one_process, master_address
from tests.core.workers.part_answers import answers, config_of, kill
from tests.placed import PREFIX
from tools.cli import main

Disturb = dict[int, Callable[[WorkersExecutor], None]]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.2", 0))
        return int(one.getsockname()[1])


class Machine:
    """A machine that runs `engine-core worker`. It is the leader of its process group."""

    def __init__(self, folder: Path, address: str, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        self._command = [sys.executable, "-P", "-m", "engine_core", "worker", "--connect", address, *options]
        self._folder = folder
        self.start()

    def start(self) -> None:
        environment = child_environment({})
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self._folder, env=environment, stderr=log, start_new_session=True
            )

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def fail(self) -> None:
        """Die with all workers, and come back."""
        self.process.kill()
        self.process.wait()
        self.start()

    def end(self) -> int:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        return self.process.wait(20)


@contextlib.contextmanager
def machines(folder: Path, port: int, count: int, *options: str) -> Iterator[list[Machine]]:
    found = [Machine(folder / f"machine{number}", f"tcp://127.0.0.2:{port}", *options) for number in range(count)]
    try:
        yield found
    finally:
        ends = [machine.end() for machine in found]
    assert not any(ends), [machine.log for machine in found]


def over(port: int, count: int) -> dict[str, Any]:
    return {"nnodes": count, "master_addr": f"127.0.0.2:{port}"}


def test_ranks_on_two_machines_and_the_death_of_one(tmp_path: Path, folder: str, alone: list[Any]) -> None:
    port = free_port()
    with machines(tmp_path, port, 1) as (other,):
        fail: Disturb = {9: lambda _: other.fail()}
        assert answers(config_of(folder, 2, **over(port, 2)), fail) == alone


def test_stages_on_two_machines(tmp_path: Path, folder: str, alone: list[Any]) -> None:
    port = free_port()
    with machines(tmp_path, port, 1):
        assert answers(config_of(folder, 1, pipeline_parallel_size=2, **over(port, 2))) == alone


def test_all_workers_may_be_on_other_machines(tmp_path: Path, folder: str, alone: list[Any]) -> None:
    """As Ray places them: two stages on machines 1 and 2, of which one dies."""
    port = free_port()
    options = {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2, **over(port, 2)}
    with machines(tmp_path, port, 2) as others:
        fail: Disturb = {9: lambda _: others[0].fail()}
        assert answers(config_of(folder, 1, **options), fail) == alone


def test_ray_is_asked_by_an_engine_s_owner_alone(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"for engines of LLM\(\) and serve"):
        answers(config_of(folder, 1, distributed_executor_backend="ray"))


def test_places_are_consecutive_from_the_first_machine_with_workers() -> None:
    assert [place.node for place in places_of(2, 2, 2)] == [0, 0, 1, 1]
    assert [place.node for place in places_of(2, 2, 2, 1)] == [1, 1, 2, 2]
    assert all(place.shares_memory for place in places_of(2, 2, 2, 1))
    assert make_wires(places_of(2, 1, 1, 1)).wires == {}


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("ranks", "stages", "count"), [(1, 2, 2), (2, 1, 2), (3, 1, 3), (2, 2, 2), (2, 2, 3), (1, 3, 3)]
)
def test_every_bit_at_any_shape_and_whichever_machine_dies(
    tmp_path: Path, deep: str, ranks: int, stages: int, count: int, dtype: str
) -> None:
    port = free_port()
    alone = answers(config_of(deep, 1, dtype=dtype))
    config = config_of(deep, ranks, dtype=dtype, pipeline_parallel_size=stages, **over(port, count))
    with machines(tmp_path, port, count - 1) as others:
        assert answers(config) == alone
        assert answers(config, {5: kill(0), 30: lambda _: others[-1].fail()}) == alone
        assert answers(config, {20: kill(ranks * stages - 1)}) == alone


@pytest.mark.soak
@pytest.mark.parametrize("stages", [1, 2])
def test_a_machine_that_falls_silent_is_lost_and_comes_back(
    tmp_path: Path, folder: str, alone: list[Any], stages: int
) -> None:
    port = free_port()
    with machines(tmp_path, port, 1) as (other,):

        def stop(_: WorkersExecutor) -> None:
            os.killpg(other.process.pid, signal.SIGSTOP)
            threading.Timer(node_messages.SILENCE_S + 3.0, os.killpg, (other.process.pid, signal.SIGCONT)).start()

        config = config_of(folder, 3 - stages, pipeline_parallel_size=stages, **over(port, 2))
        assert answers(config, {9: stop}) == alone
        assert "joins again" in other.log


@pytest.mark.soak
def test_a_worker_that_hangs_on_another_machine_is_found(
    tmp_path: Path, folder: str, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_clock, "LEAST_S", 0.4)
    port = free_port()
    with machines(tmp_path, port, 1):
        config = config_of(folder, 1, pipeline_parallel_size=2, **over(port, 2))
        assert answers(config, {9: kill(1, signal.SIGSTOP)}) == alone


class Network:
    """A network between an engine's port and the port of this object: it can stand still, or be cut."""

    def __init__(self, port: int) -> None:
        self._target, self._listener = port, socket.create_server(("127.0.0.2", 0))
        self.port = int(self._listener.getsockname()[1])
        self.runs = threading.Event()
        self.runs.set()
        self._pairs: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.2", self._target))
                except OSError:
                    near.close()
                    continue
                self._pairs += near, far
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.runs.wait()
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for end in self._pairs:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def stand_still(self, seconds: float) -> None:
        self.runs.clear()
        threading.Timer(seconds, self.runs.set).start()

    def close(self) -> None:
        self.runs.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for end in self._pairs:
            end.close()


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["cut", "short", "long"])
def test_a_network_that_fails_for_a_while(tmp_path: Path, folder: str, alone: list[Any], fault: str) -> None:
    port = free_port()
    network = Network(port)
    with contextlib.closing(network), machines(tmp_path, network.port, 1) as (other,):
        seconds = {"short": 1.0, "long": node_messages.SILENCE_S + 3.0}
        disturb: Disturb = {9: lambda _: network.stand_still(seconds[fault]) if fault in seconds else network.cut()}
        assert answers(config_of(folder, 1, pipeline_parallel_size=2, **over(port, 2)), disturb) == alone
        assert other.log.count("machine 1 of 2") == (1 if fault == "short" else 2)  # short: nobody has noticed


def test_a_machine_with_other_files_is_refused_and_one_that_is_missing_is_named(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]
) -> None:
    monkeypatch.setattr(nodes, "files_fingerprint", lambda config: "0123456789abcdef")
    monkeypatch.setattr(f"{PREFIX}core.workers.executor._JOIN_S", 4.0)
    port = free_port()
    machine = Machine(tmp_path / "other", f"tcp://127.0.0.2:{port}")
    with pytest.raises(EngineStartError, match=r"machine 1 of 2 has not joined within 4 s: run `engine-core worker"):
        WorkersExecutor(config_of(folder, 1, pipeline_parallel_size=2, **over(port, 2)))
    assert machine.process.wait(10) == 1
    assert "refuses this machine: the files of" in machine.log
    assert "waiting for machine 1 of 2 to join at tcp://127.0.0.2:" in logged()


@pytest.mark.soak
def test_machines_with_keys_and_streams_of_a_whole_engine(tmp_path: Path, folder: str) -> None:
    """The engine process, its keys, and a machine without them, which is not heard."""
    port, keys, file = free_port(), str(tmp_path / "keys"), str(tmp_path / "machine.json")
    make_engine_keys(keys)
    add_client(keys, "machine1", file)
    address = f"tcp://127.0.0.2:{port}"
    stranger = Machine(tmp_path / "stranger", address)
    known = Machine(tmp_path / "known", f"{address}?keys={file}", "--node-rank", "1")
    config = config_of(folder, 2, nnodes=2, master_addr=f"{address}?keys={keys}")
    try:
        with EngineProcess(config):
            assert "machine 1 of 2" in known.log
    finally:
        ends = [known.end(), stranger.end()]
        assert ends == [0, 0], [known.log, stranger.log]
    assert "machine 1 of 2" not in stranger.log


def test_whoever_sends_without_a_pause_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines are looked at, and commands run, in the middle of a flood: it has as many frames as are taken."""
    port, turns, looks = free_port(), 3, list[float]()
    enough = threading.Event()
    received = 0

    def receive(self: nodes.Nodes, socket: Any) -> None:
        nonlocal received
        received += 1

    def look(self: nodes.Nodes, now: float) -> None:
        looks.append(now)
        if len(looks) == turns:
            enough.set()

    monkeypatch.setattr(nodes.Nodes, "_receive", receive)
    monkeypatch.setattr(nodes.Nodes, "_look_at_seats", look)
    monkeypatch.setattr(nodes, "BEAT_S", 0.0)
    monkeypatch.setattr(nodes, "pending_events", lambda socket: nodes.READABLE)
    ours = nodes.Nodes(EngineConfig(executor="fake", pipeline_parallel_size=2, **over(port, 2)))
    try:
        ran = threading.Event()
        ours._tell(ran.set)
        assert ran.wait(20)
        assert enough.wait(20)
        assert received >= nodes._FRAMES_AT_ONCE
    finally:
        ours.close()


def test_options_of_several_machines_are_checked(folder: str) -> None:
    with pytest.raises(ConfigError, match="nnodes=2 is more than the 1 workers"):
        config_of(folder, 1, **over(1, 2))
    with pytest.raises(ConfigError, match="nnodes=2 needs master_addr"):
        config_of(folder, 2, nnodes=2)
    with pytest.raises(ConfigError, match="master_addr must be a host"):
        config_of(folder, 2, nnodes=2, master_addr="")
    assert main(["worker", "--connect", "tcp://10.1.2.3:29501"]) == 1  # without keys
    assert main(["serve", folder, "--node-rank", "1", "--master-addr", "10.1.2.3"]) == 1


def test_every_worker_has_the_ends_of_its_links() -> None:
    for size, stages, count in [(2, 1, 2), (2, 2, 3), (3, 2, 4), (2, 3, 1), (4, 1, 2)]:
        places = places_of(size, stages, count)
        assert [place.node for place in places] == sorted(place.node for place in places)
        wirings = [make_wires(places, node, has_store=True) for node in range(count)]
        try:
            for place in places:
                wires = wirings[place.node].wires[place.number]
                assert len(wires.peers) == (0 if size == 1 else 1 if place.rank else size - 1)
                assert [fd < 0 for fd in wires.ranks] == (
                    [] if place.shares_memory else [rank == place.rank for rank in range(size)]
                )
                assert (wires.before < 0, wires.after < 0) == (place.stage == 0, place.is_last_stage)
            crossing = {one: ends for one, ends in ends_of_streams(places).items() if one >= len(places)}
            asked = {block_stream_of(place.number, places) for place in places}  # whose ends on node 0 the engine has
            for node, wiring in enumerate(wirings):
                own = {stream for stream, ends in crossing.items() if node in ends}
                assert set(wiring.carried) == (own if node else own - asked)
        finally:
            for wiring in wirings:
                wiring.close()


def test_addresses_for_other_machines() -> None:
    config = EngineConfig(executor="fake", pipeline_parallel_size=2, nnodes=2, master_addr="127.0.0.2")
    assert in_one_process(config).nnodes == 1
    assert master_address(config) == "tcp://127.0.0.2:29501"
    for given in ("node1:5", "10.0.0.5:5", "[::1]:5", "tcp://10.0.0.5:5?keys=/k"):
        config = EngineConfig(executor="fake", pipeline_parallel_size=2, nnodes=2, master_addr=given)
        assert master_address(config) == (given if "://" in given else f"tcp://{given}")
    config = EngineConfig(executor="fake", pipeline_parallel_size=2, nnodes=2, master_addr="[::1]")
    assert master_address(config) == "tcp://[::1]:29501"
