"""Beside each request that once stopped the server, streams of others go on, and /health answers."""

import os
from collections.abc import Iterator

import pytest

from ipc.files.model_files import resolve_model
from tests.frontend.http.caller import Caller, serving
from tests.hostile.work.requests import Harm, harms
from tests.hostile.work.witness import witness

FAKE = (
    "--executor",
    "fake",
    "--executor-option",
    "vocab_size=49152",
    "--executor-option",
    "max_model_len=4096",
    "--max-num-seqs",
    "96",
)
#: Generous: a busy machine stops everybody. What these requests did before was 3 to 16 s, or the end of all streams.
MAX_GAP_S = 2.5
MAX_MEMORY_MIB = 400
#: The longest waits of streams and of /health on a machine that is not busy otherwise, without those of the witness.
QUIET_GAP_S, QUIET_HEALTH_S = 0.25, 0.1


@pytest.fixture(scope="module")
def caller() -> Iterator[Caller]:
    options = ("--executor-option", "step_us=12000", "-m", str(resolve_model(None)), "--served-model-name", "demo")
    with serving(*FAKE, *options) as caller:
        yield caller


def test_all_of_them(caller: Caller) -> None:
    """One after the other, beside 64 streams."""
    before = http_pid(caller)
    with witness(caller, 64, 400) as seen:
        answers = [(harm, caller.post(harm.path, harm.body).status) for harm in harms()]
    assert [(harm.name, status) for harm, status in answers if status not in harm.statuses] == []
    assert (seen[0].cut, seen[0].wrong) == (0, 0)
    assert seen[0].stream_gap < MAX_GAP_S
    assert seen[0].health_gap < MAX_GAP_S
    assert http_pid(caller) == before
    assert peak_mib(before) < MAX_MEMORY_MIB


@pytest.mark.soak
@pytest.mark.parametrize("harm", harms(8), ids=lambda harm: harm.name)
def test_each_again_and_again(caller: Caller, harm: Harm) -> None:
    """Ten times, with bodies of up to 8 MB. On a machine that others use it may fail, by what it prints."""
    before = http_pid(caller)
    waited = core_wait_s(before)
    with witness(caller, 64, 400) as seen:
        for _ in range(10):
            assert caller.post(harm.path, harm.body).status in harm.statuses
    one = seen[0]
    gap, health, late = 1e3 * one.stream_gap, 1e3 * one.health_gap, 1e3 * one.late
    shares = f"{1e3 * one.server_stream_gap:.0f} and {1e3 * one.server_health_gap:.0f} ms of it the server's"
    waits = f"the server's loop waited {1e3 * (core_wait_s(before) - waited):.0f} ms in all for a core"
    print(f"{harm.name}: streams {gap:.0f} ms, /health {health:.0f} ms, {shares}; witness {late:.0f} ms late; {waits}")
    assert (one.cut, one.wrong, http_pid(caller)) == (0, 0, before)
    assert one.server_stream_gap < QUIET_GAP_S
    assert one.server_health_gap < QUIET_HEALTH_S
    assert peak_mib(before) < MAX_MEMORY_MIB


def http_pid(caller: Caller) -> int:
    """The process id of the server's HTTP process."""
    children: list[int] = []
    for task in os.scandir(f"/proc/{caller.process.pid}/task"):
        with open(f"{task.path}/children") as file:
            children += map(int, file.read().split())
    return next(pid for pid in children if b"frontend.http" in _read(pid, "cmdline"))


def core_wait_s(pid: int) -> float:
    """The seconds in which a process's first thread was ready to run and had no core."""
    return int(_read(pid, "schedstat").split()[1]) / 1e9


def peak_mib(pid: int) -> int:
    """The most memory that a process had, in MiB."""
    return memory_mib(pid, b"VmHWM:")


def memory_mib(pid: int, field: bytes = b"VmRSS:") -> int:
    """The memory that a process has, in MiB."""
    line = next(line for line in _read(pid, "status").splitlines() if line.startswith(field))
    return int(line.split()[1]) >> 10


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
