"""HttpWorker says why its process does not serve."""

import socket
from pathlib import Path

import pytest

from frontend.http.process import worker
from frontend.http.process.options import HttpOptions
from frontend.http.process.worker import HttpWorker
from frontend.http.wire.listen import bind_http
from ipc.errors import EngineStartError


def test_a_worker_that_is_not_ready_in_time_is_ended_and_the_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "START_S", 0.0)
    text = "did not start: it reported nothing for 0 s"
    with bind_http("127.0.0.1:0") as bound, socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/silent")  # an engine that never answers, so that the worker has nothing to report
        silent.listen()
        with pytest.raises(EngineStartError, match=text):
            HttpWorker(f"ipc://{tmp_path}/silent", [bound], HttpOptions()).start()


def test_what_a_worker_says_before_its_end_is_the_reason(tmp_path: Path) -> None:
    with bind_http("127.0.0.1:0") as bound, pytest.raises(EngineStartError, match=r"did not start: .*none"):
        HttpWorker(f"ipc://{tmp_path}/none", [bound], HttpOptions()).start()
