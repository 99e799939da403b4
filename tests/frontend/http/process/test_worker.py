"""HttpWorker says why its process does not serve."""

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
    silent = pytest.raises(EngineStartError, match="did not start: it reported nothing for 0 s")
    with bind_http("127.0.0.1:0") as bound, silent:
        HttpWorker(f"ipc://{tmp_path}/none", [bound], HttpOptions()).start()


def test_what_a_worker_says_before_its_end_is_the_reason(tmp_path: Path) -> None:
    with bind_http("127.0.0.1:0") as bound, pytest.raises(EngineStartError, match=r"did not start: .*none"):
        HttpWorker(f"ipc://{tmp_path}/none", [bound], HttpOptions()).start()
