"""SupervisedWorker: an HTTP server that dies or hangs is followed by another one; no other client notices it."""

import asyncio
import os
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from frontend.engine.process import EngineProcess
from frontend.http.process import supervised_worker
from frontend.http.process.options import HttpOptions
from frontend.http.process.supervised_worker import SupervisedWorker
from frontend.http.wire.listen import bind_http
from frontend.llm import LLM
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.frontend.http.caller import Caller, free_blocks, post_bytes, serving, wait_for

FAKE = EngineConfig(executor="fake", executor_options=fake_options(vocab_size=1000, max_model_len=4096))


class Watched:
    """A supervised worker and the loop that watches it, on a thread."""

    def __init__(self, engine: EngineProcess, options: HttpOptions) -> None:
        self.news: list[str] = []
        self.bound = bind_http("127.0.0.1:0")
        self.port = int(self.bound.getsockname()[1])
        self.supervised = SupervisedWorker(engine.address, [self.bound], options, self.news.append)
        self.supervised.start()
        self.loop = asyncio.new_event_loop()
        self.loop.call_soon(self.supervised.watch, self.loop)
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    @property
    def pid(self) -> int:
        return self.supervised.worker.pid

    def do(self, work: Callable[[], None]) -> None:
        """Do it in the loop."""
        self.loop.call_soon_threadsafe(work)

    def is_live(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/live", timeout=10) as answer:
                return answer.status == 200
        except OSError:
            return False

    def close(self) -> None:
        if self.loop.is_closed():
            return
        self.do(self.loop.stop)
        self.thread.join()
        self.supervised.stop()
        self.loop.close()
        self.bound.close()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """One whose worker may be silent for 2.5 s; it says every second that it is there."""
    monkeypatch.setattr(supervised_worker, "_TURN_S", 2.0)
    monkeypatch.setattr(supervised_worker, "_LOOK_S", 0.1)
    monkeypatch.setattr(supervised_worker, "_RETRY_S", 0.1)
    with EngineProcess(FAKE) as engine:
        watched = Watched(engine, HttpOptions(hang_timeout=0.5))
        try:
            yield watched
        finally:
            watched.close()


def test_one_that_hangs_is_killed_and_followed(watched: Watched) -> None:
    first = watched.pid
    os.kill(first, signal.SIGSTOP)
    wait_for(lambda: len(watched.news) == 2)
    assert watched.news[0].startswith(f"the HTTP server ({first}) hangs: no sign of it for 2.")
    assert watched.news[1] == "the HTTP server was killed by SIGKILL; it is restarted"
    wait_for(watched.is_live)
    assert watched.pid != first


@pytest.mark.soak
def test_one_that_works_is_left_alone_and_a_stopped_watcher_accuses_nobody(watched: Watched) -> None:
    pid = watched.pid
    threading.Event().wait(1.0)
    watched.do(lambda: threading.Event().wait(3.5))  # longer than a worker may be silent
    threading.Event().wait(4.0)
    assert (watched.pid, watched.news) == (pid, [])


@pytest.mark.soak
def test_one_that_does_not_start_is_tried_again(watched: Watched) -> None:
    worker = watched.supervised.worker
    start, worker._start = worker._start, worker._start.__class__("ipc:///nowhere/s", (), HttpOptions())
    os.kill(watched.pid, signal.SIGKILL)
    wait_for(lambda: len(watched.news) >= 2)
    worker._start = start
    assert watched.news[1].startswith("the HTTP server did not start: "), watched.news
    wait_for(watched.is_live, 40.0)


@pytest.mark.parametrize("is_starting", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_after_a_drain_none_follows(watched: Watched, is_starting: bool) -> None:
    if is_starting:
        os.kill(watched.pid, signal.SIGKILL)
        wait_for(lambda: watched.news != [] and watched.supervised.worker._child is not None)
    worker = watched.supervised.worker
    watched.do(watched.supervised.drain)
    wait_for(lambda: watched.supervised.has_ended, 60.0)  # stop() kills a worker that still starts after 5 s
    watched.do(watched.supervised.stop)
    wait_for(lambda: worker.exit_status is not None)
    watched.close()
    assert worker.exit_status == 0
    assert len(watched.news) == int(is_starting)


def test_a_drain_before_the_next_one_is_the_end(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_worker, "_RETRY_S", 2.0)
    os.kill(watched.pid, signal.SIGKILL)
    wait_for(lambda: watched.news != [])
    watched.do(watched.supervised.drain)
    wait_for(lambda: watched.supervised.has_ended)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", watched.port), timeout=5)


def test_a_death_under_streams() -> None:
    """Its own callers are cut, a client of the engine notices nothing, the blocks come back, and it answers again."""
    options = (
        "--executor",
        "fake",
        "--executor-option",
        "vocab_size=1000",
        "--executor-option",
        "step_us=2000",
        "--executor-option",
        "max_model_len=4096",
    )
    with serving(*options) as caller, LLM(connect=caller.connect) as llm:
        all_free = free_blocks(llm)
        for number in (signal.SIGKILL, signal.SIGSEGV):
            body = b'{"prompt": [7, 8], "max_tokens": 2000, "ignore_eos": true, "stream": true}'
            peers = [caller.socket() for _ in range(8)]
            for peer in peers:
                peer.sendall(post_bytes("/v1/completions", body))
            assert all(peer.recv(100) for peer in peers)
            witness = llm.client.submit([5, 6], SamplingParams(max_tokens=400, temperature=0, ignore_eos=True), seed=0)
            os.kill(_worker_pid(caller), number)
            for peer in peers:
                while peer.recv(65_536):
                    pass
                peer.close()
            answer = caller.complete([7, 8], max_tokens=4, temperature=0, return_token_ids=True)
            assert answer.json["choices"][0]["token_ids"] == fake_tokens([7, 8], 4, vocab_size=1000)
            wait_for(lambda: bool(llm.client.read(witness).finish))  # noqa: B023 - it is called here
            assert llm.client.read(witness).token_ids.tolist() == fake_tokens([5, 6], 400, vocab_size=1000)
            wait_for(lambda: free_blocks(llm) == all_free)


def _worker_pid(caller: Caller) -> int:
    found: list[int] = []
    for task in os.scandir(f"/proc/{caller.process.pid}/task"):
        with open(f"{task.path}/children") as file:
            found += map(int, file.read().split())
    return next(pid for pid in found if b"frontend.http" in _command(pid))


def _command(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
