"""The bound on connections: an engine at its limit of file descriptors goes on, and listens again later."""

import contextlib
import resource
import select
import socket as sockets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from core.border import io_thread
from core.border.doorway import max_connections
from ipc.wire.messages import GetStatistics, Statistics
from tests.core.running_engine import Running, expected, start_engine
from tests.placed import placed
from tests.raw_client import PATIENCE_S, RawClient

__all__ = ["start_engine"]  # a fixture
ROOT = Path(__file__).resolve().parents[3]


def connect(path: str, count: int) -> list[sockets.socket]:
    """Open connections that say nothing."""
    peers = [sockets.socket(sockets.AF_UNIX) for _ in range(count)]
    for peer in peers:
        peer.connect(path)  # waits while the listener's queue is full
    return peers


def num_open(peers: list[sockets.socket]) -> int:
    """Return how many of the connections the engine has not cut; they have its greeting to read."""
    for peer in peers:
        peer.setblocking(False)
    return sum(bool(_read(peer)) for peer in peers)


def _read(peer: sockets.socket) -> bytes:
    last = b""
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        while last := peer.recv(1000):
            pass
        return b""
    return last or b"open"


def test_connections_beyond_the_bound_are_cut_and_streams_go_on(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_thread, "max_connections", lambda: 16)
    running = start(lease_ms=60_000)
    with contextlib.ExitStack() as stack, RawClient(running.address) as witness:
        witness.add(1, [1], max_tokens=2000)
        peers = connect(running.address.removeprefix("ipc://"), 60)
        for peer in peers:
            stack.callback(peer.close)
        assert witness.finish(1) == [expected([1], 2000)]
        doorway = running.io.border.doorway
        assert doorway is not None
        while doorway.num_cut < 45:
            witness.statistics()
        assert num_open(peers) <= 15, "fewer where libzmq has given up on silent ones"
        for peer in peers:
            peer.close()
        with RawClient(running.address) as later:
            later.add(1, [2])
            assert later.finish(1) == [expected([2], 8)]


def test_the_bound_lies_below_the_limit_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, expected_bound in ((256, 128), (1024, 512), (4096, 2839), (2**20, 8192), (resource.RLIM_INFINITY, 8192)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert max_connections() == expected_bound


SERVE = "import sys; from tools.cli import main; sys.exit(main())"


def test_an_engine_at_the_limit_of_descriptors_lives(tmp_path: Path) -> None:
    """libzmq's listener on ipc ends the process when accept() finds no descriptor."""
    address = f"ipc://{tmp_path}/s"
    options = ("serve", "--executor", "fake", "--listen", address, "--num-blocks-override", "100")
    server = subprocess.Popen(
        [sys.executable, "-c", placed(SERVE), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 700)),
    )
    assert server.stdout is not None
    with contextlib.ExitStack() as stack:
        stack.callback(server.stdout.close)
        stack.callback(server.wait)
        stack.callback(server.terminate)
        assert select.select([server.stdout], [], [], 60)[0]
        assert b"ready" in server.stdout.readline()
        witness = stack.enter_context(RawClient(address))
        peers = connect(str(tmp_path / "s"), 450)
        for peer in peers:
            stack.callback(peer.close)
        witness.send(GetStatistics(1))
        witness.receive(Statistics, PATIENCE_S)
        assert server.poll() is None
