"""The scheduler that a config names: found by its name, refused with the reason, and all that the engine needs."""

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core import log
from core.capture import writer as capture_writer
from core.capture.engine import CapturedEngine, start_capture
from core.capture.file import CaptureFile
from core.capture.records import OtherModelError
from core.execution.executor import ModelInfo
from core.executors.by_name import load_executor
from core.scheduling.by_name import import_scheduler
from core.scheduling.interface import SchedulerInterface
from core.scheduling.scheduler import Scheduler, create
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options
from ipc.options.resolved import ResolvedConfig
from ipc.options.schedulers import SCHEDULERS
from ipc.wire.messages import CallFailed
from ipc.wire.scheduling_messages import Explain
from tests.captures import CONFIG, make_request
from tests.core.driving import ByHand, Driver, add_message, small_config
from tests.fake_options import with_options
from tools.commands.replay.__main__ import main
from tools.lab.check_scheduler.__main__ import check_scheduler

SCHEDULER_API = (1, 0)  # this module is one, too
NARROW, OTHER = f"{__name__}:narrow", f"{__name__}:create"
NAMES = {*SchedulerInterface.__annotations__, *vars(SchedulerInterface)}
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "plugin_scheduler"


class Narrow:
    """A scheduler that has the names of the interface alone."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        assert name in NAMES, f"{name} is not part of the interface"
        return getattr(self._scheduler, name)


def narrow(config: ResolvedConfig, info: ModelInfo, epoch: int) -> Narrow:
    return Narrow(create(config, info, epoch))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three distributions with a scheduler: one that fits, one of a later version, one without create()."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = set(sys.modules)
    sources = {
        "good": "from core.scheduling.scheduler import create\nSCHEDULER_API = (1, 0)\n",
        "later": "SCHEDULER_API = (1, 1)\n",
        "empty": "SCHEDULER_API = (1, 0)\n",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}_module.py").write_text(source)
        info = tmp_path / f"{name}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[{SCHEDULERS}]\n{name} = {name}_module\n")
    importlib.invalidate_caches()
    yield
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_scheduler_is_found_by_its_name(installed: None) -> None:
    assert import_scheduler(EngineConfig(scheduler_cls="good")) is create
    assert "later_module" not in sys.modules
    assert import_scheduler(EngineConfig(scheduler_cls=OTHER)) is create
    assert import_scheduler(config_from_options(scheduler_cls=None)) is create


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("goof", "there is no scheduler 'goof'; available: default, empty, good, later; did you mean good?"),
        ("round_robin", f"a plug-in registers its scheduler in the group {SCHEDULERS}"),
        ("later", r"written for SCHEDULER_API \(1, 1\), but this engine supports \(1, 0\)"),
        ("empty", r"has no create\(config, info, epoch\)"),
        ("good_module:other", r"the module good_module has no other\(config, info, epoch\)"),
        ("nothing_here:create", "scheduler 'nothing_here:create' cannot be imported: No module named 'nothing_here'"),
        ("os:path", "'os:path' is written for SCHEDULER_API None"),
    ],
)
def test_a_scheduler_that_does_not_fit_is_refused(installed: None, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        import_scheduler(EngineConfig(scheduler_cls=name))


@pytest.mark.parametrize("name", ["", "a b", "a:b:c", "a:", ":b", "a.:b", "../a", "a" * 129, 7])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="scheduler_cls must be 'default', the name of an installed scheduler"):
        EngineConfig(scheduler_cls=name)


def test_captures_of_a_plug_in_have_no_checkpoints_to_begin_with() -> None:
    with pytest.raises(ConfigError, match="capture_rotate_bytes starts each file with a checkpoint"):
        EngineConfig(scheduler_cls=NARROW, capture_rotate_bytes=2**20)


def test_the_engine_needs_nothing_but_the_interface() -> None:
    findings = list(check_scheduler(EngineConfig(scheduler_cls=NARROW), 1))
    assert all(finding.is_right for finding in findings), findings


def test_only_the_built_in_parts_explain() -> None:
    driver = Driver(small_config(scheduler_cls=NARROW))
    replies = driver.step([(0, Explain(5))])
    assert replies == [(0, CallFailed(5, replies[0][1].code, replies[0][1].message))]  # type: ignore[union-attr]
    assert f"scheduler '{NARROW}' does not record why requests run" in replies[0][1].message  # type: ignore[union-attr]


def test_rows_of_ended_requests_are_counted_until_the_next_plan() -> None:
    hand = ByHand(small_config())
    for number, count in ((1, 1), (2, 3)):
        hand.add(add_message(number, [5, 6], count))
    hand.step()
    assert hand.scheduler.has_finished_requests
    hand.step()
    assert not hand.scheduler.has_finished_requests
    hand.scheduler.shutdown()


def captured(path: Path, scheduler_cls: str) -> None:
    config = with_options(CONFIG, scheduler_cls=scheduler_cls)
    executor = load_executor(config)
    executor.initialize_cache(config)
    writer = start_capture(str(path), config, executor.info, "test", 0)
    engine = CapturedEngine(config, executor, writer)
    for number in range(12):
        engine.step([(0, make_request(number, random.Random(number)))], 10**12 + number * 1_000_000)
    writer.close()
    executor.close()


def test_a_capture_chooses_no_scheduler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.cap"
    captured(path, NARROW)
    with pytest.raises(OtherModelError, match=f"captured with the scheduler '{NARROW}', and this is 'default'"):
        CaptureFile(path)
    assert CaptureFile(path, None).num_steps == 12
    assert main([str(path)]) == 5
    assert main([str(path), "--scheduler-cls", OTHER]) == 5
    assert f"with the scheduler '{NARROW}', and this is '{OTHER}'" in capsys.readouterr().err
    assert main([str(path), "--scheduler-cls", NARROW]) == 0
    assert "0 differences" in capsys.readouterr().out
    plain = tmp_path / "plain.cap"
    captured(plain, "default")
    assert main([str(plain), "--scheduler-cls", NARROW]) == 5


def test_a_capture_of_another_scheduler_has_no_checkpoints_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "say", said.append)
    monkeypatch.setattr(capture_writer, "CHECKPOINT_BYTES", 1000)
    path, plain = tmp_path / "run.cap", tmp_path / "plain.cap"
    captured(plain, "default")
    captured(path, NARROW)
    assert CaptureFile(plain).checkpoints
    assert not CaptureFile(path, NARROW).checkpoints
    assert len(said) == 1
    assert said[0].startswith("engine-core: this engine cannot make checkpoints: ")
    assert said[0].endswith(f"{__name__}:Narrow is not a class that a checkpoint may have")
    assert main([str(path), "--scheduler-cls", NARROW]) == 0


@pytest.mark.checkout
def test_the_example_serves_the_shortest_job_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    ends: dict[str, list[int]] = {}
    for name in ("default", "engine_core_shortest.scheduler:create"):
        driver = Driver(small_config(max_num_seqs=1, scheduler_cls=name))
        long, short = add_message(1, [5, 6, 7], 30), add_message(2, [8, 9], 3)
        driver.step([(0, long)])
        driver.step([(0, short)])
        order = []
        for _ in range(80):
            driver.step()
            order += [n for n in (1, 2) if driver.inbox.received[0, n].is_over and n not in order]
        ends[name] = order
    assert list(ends.values()) == [[1, 2], [2, 1]]


@pytest.mark.checkout
def test_a_choice_keeps_the_blocks_that_another_is_about_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under an order of remaining tokens a choice may go before the one whose prompt it takes over."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    name = "engine_core_shortest.scheduler:create"
    findings = {one.name: one for one in check_scheduler(EngineConfig(scheduler_cls=name), 2)}
    assert findings["several choices"].is_right, findings["several choices"]
