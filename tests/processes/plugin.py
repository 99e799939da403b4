"""Tests in several processes, `pytest --processes N`: one process collects them and forks those that run them.

Collecting takes as long as thousands of tests, so it is done once. A forked process has what another pytest would have:
captured output, session fixtures and a folder of its own. It sends the reports of each test; the first process shows
and counts them. If a process dies, the test that it ran has failed, and another process goes on after it.
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest
from _pytest import runner, tmpdir
from _pytest.config import create_terminal_writer

from tests.processes.shares import Shares

_INTERRUPTED, _FAILED = 130, 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("processes").addoption(
        "--processes", type=int, default=1, metavar="N", help="run the tests in N processes, forked from this one"
    )


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    is_whole = not session.testsfailed or config.option.continue_on_collection_errors
    if config.option.processes < 2 or config.option.collectonly or not is_whole or not session.items:
        return None  # pytest's own
    with tempfile.TemporaryFile() as shared:
        files = [str(item.path) for item in session.items]
        _Processes(session, Shares(files, config.option.processes, shared)).run()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


class _Processes:
    """The first process's side: who runs, and what has been heard."""

    def __init__(self, session: pytest.Session, shares: Shares) -> None:
        self._session, self._config, self._shares = session, session.config, shares
        self._base = tmpdir.TempPathFactory.from_config(session.config, _ispytest=True).getbasetemp()
        self._running: dict[Connection, tuple[int, int]] = {}  # (number, process id)
        self._num_heard = 0

    def run(self) -> None:
        try:
            for number in range(self._config.option.processes):
                self._fork(number)
            while self._running:
                for connection in wait(list(self._running)):
                    assert isinstance(connection, Connection)
                    self._hear(connection)
        finally:
            self._shares.clear()
            for connection, (_, pid) in self._running.items():
                connection.close()
                os.waitpid(pid, 0)
        if not self._is_stopped:
            assert self._num_heard == len(self._session.items), f"{self._num_heard} tests have run"

    @property
    def _is_stopped(self) -> bool:
        return bool(self._session.shouldfail or self._session.shouldstop)

    def _fork(self, number: int) -> None:
        num_threads = len(os.listdir("/proc/self/task"))
        if num_threads > 1:
            raise pytest.UsageError(
                f"collecting has started {num_threads - 1} threads, which forked processes would lack"
            )
        reader, writer = multiprocessing.Pipe(duplex=False)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            reader.close()
            _Forked(self._session, self._shares, writer, number).run(self._base)
        writer.close()
        self._running[reader] = number, pid

    def _hear(self, connection: Connection) -> None:
        try:
            reports = connection.recv()
        except (EOFError, OSError):
            self._bury(connection)
            return
        hook = self._config.hook
        self._num_heard += 1
        for data in reports:
            report = hook.pytest_report_from_serializable(config=self._config, data=data)
            hook.pytest_runtest_logreport(report=report)
        if self._is_stopped:
            self._shares.clear()

    def _bury(self, connection: Connection) -> None:
        """A process has ended. If it has not run its tests, the test that it ran has failed."""
        number, pid = self._running.pop(connection)
        connection.close()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0:
            return
        place = self._shares.running(number)
        if place is None:
            raise RuntimeError(f"a process of the tests ended with status {status} outside of any test")
        item = self._session.items[place]
        text = f"the process that ran this test ended with status {status}"
        self._num_heard += 1
        self._config.hook.pytest_runtest_logreport(
            report=pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        )
        if not self._is_stopped:
            self._fork(number)


class _Forked:
    """The side of a process that runs tests."""

    def __init__(self, session: pytest.Session, shares: Shares, writer: Connection, number: int) -> None:
        self._session, self._config, self._shares = session, session.config, shares
        self._writer, self._number = writer, number
        self._reports: list[Any] = []

    def run(self, base: os.PathLike[str]) -> NoReturn:
        """Run tests while there are some, and end."""
        status = _FAILED
        try:
            self._settle(base)
            try:
                self._run_tests()
            finally:
                runner.pytest_sessionfinish(self._session)
            status = 0
        except KeyboardInterrupt:
            status = _INTERRUPTED
        except BrokenPipeError:  # the first process has ended
            pass
        except BaseException:
            self._restart_capture()
            traceback.print_exc()
        finally:
            os._exit(status)

    def _settle(self, base: os.PathLike[str]) -> None:
        """Replace what the processes would share."""
        self._restart_capture()
        manager = self._config.pluginmanager
        manager.unregister(name="terminalreporter")
        manager.register(_Silent(self._config), "terminalreporter")
        manager.register(self)
        self._config.option.basetemp = os.path.join(base, f"p{os.getpid()}")  # short: sockets are made there
        tmpdir.pytest_configure(self._config)

    def _restart_capture(self) -> None:
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.stop_global_capturing()
            capture.start_global_capturing()
            capture.suspend_global_capture()

    def _run_tests(self) -> None:
        items = self._session.items
        while (places := self._shares.advance(self._number)) is not None:
            running, following = places
            after = None if following is None else items[following]
            self._config.hook.pytest_runtest_protocol(item=items[running], nextitem=after)
            self._writer.send(self._reports)
            self._reports.clear()
            if self._session.shouldfail or self._session.shouldstop:
                return

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(data)


class _Silent:
    """Stands for the reporter of a forked process. Only what a test writes when its time is over is shown."""

    def __init__(self, config: pytest.Config) -> None:
        self._tw = create_terminal_writer(config, sys.__stderr__)
