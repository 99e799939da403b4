"""`engine-core check-scheduler`: the built-in scheduler passes, each planted fault fails with its numbers."""

import itertools
from typing import Any

import pytest

from core.batch.request import Request
from core.execution.executor import ModelInfo
from core.execution.plan import SchedulerOutput
from core.scheduling.scheduler import Scheduler
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from tools.cli import main
from tools.lab.check_scheduler.__main__ import check_scheduler

SCHEDULER_API = (1, 0)
_calls = itertools.count()


class Leaking(Scheduler):
    """Takes a block that no row gets."""

    def schedule(self, now_ns: int) -> SchedulerOutput:
        if self._step == 3 and self.pool.num_free:
            self.pool.allocate(1)
        return super().schedule(now_ns)


class Wasteful(Scheduler):
    """Plans twice as many tokens as a step may have."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._token_budget *= 2


class Forgetful(Scheduler):
    """Drops every third request."""

    def add_request(self, choices: list[Request], now_ns: int, deadline_ns: int = 0) -> None:
        if choices[0].number % 3 != 2:
            super().add_request(choices, now_ns, deadline_ns)


class Fickle(Scheduler):
    """Depends on what other schedulers of the process have done."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.max_num_seqs = min(self.max_num_seqs, 1 + next(_calls) % 2)


class Sleeping(Scheduler):
    """Plans nothing."""

    has_work = True

    def _running_first(self, draft: Any) -> None:
        return


def leaking(config: ResolvedConfig, info: ModelInfo, epoch: int) -> Scheduler:
    return Leaking(config, info.eos_token_ids, epoch)


def wasteful(config: ResolvedConfig, info: ModelInfo, epoch: int) -> Scheduler:
    return Wasteful(config, info.eos_token_ids, epoch)


def forgetful(config: ResolvedConfig, info: ModelInfo, epoch: int) -> Scheduler:
    return Forgetful(config, info.eos_token_ids, epoch)


def fickle(config: ResolvedConfig, info: ModelInfo, epoch: int) -> Scheduler:
    return Fickle(config, info.eos_token_ids, epoch)


def sleeping(config: ResolvedConfig, info: ModelInfo, epoch: int) -> Scheduler:
    return Sleeping(config, info.eos_token_ids, epoch)


def test_the_built_in_scheduler_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-scheduler", "default", "--examples", "2"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert all(line.startswith("     ok  ") for line in lines)
    assert [line.split(":")[0].split("ok  ")[1] for line in lines] == [
        "interface",
        "room for all",
        "too few blocks",
        "two steps at once",
        "aborts",
        "pauses and holds",
        "a lost executor",
        "several choices",
        "options",
    ]
    assert " 0 preemptions" not in lines[2]
    assert last == "scheduler default: every check passed"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("leaking", "blocks"),
        ("wasteful", "the budget is"),
        ("forgetful", "requests have not ended after"),
        ("fickle", "the same inputs led to other plans"),
        ("sleeping", "requests have not ended after"),
    ],
)
def test_a_fault_is_named(name: str, text: str) -> None:
    findings = check_scheduler(EngineConfig(scheduler_cls=f"{__name__}:{name}"), 1)
    first = next(one for one in findings if one.is_right is False)
    assert text in first.text
    assert first.text.startswith("example 0: ")


def test_a_missing_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Scheduler, "shutdown")
    first = next(check_scheduler(EngineConfig(), 1))
    assert (first.is_right, first.text) == (False, "no shutdown")
