"""A pytest plugin that writes what has passed and failed into a file: `-p tests.stress.counted --counted FILE`."""

import json
import os
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("processes").addoption("--counted", type=Path, required=True, metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Counted(config.option.counted))


class _Counted:
    """Forked processes (tests/processes/plugin.py) have one too; the first process hears of every test."""

    def __init__(self, file: Path) -> None:
        self._file, self._pid = file, os.getpid()
        self._num_passed = 0
        self._failed: dict[str, None] = {}
        self._slowest = ("", 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None
        if report.when == "call":
            self._num_passed += report.passed
            self._slowest = max(self._slowest, (report.nodeid, round(report.duration, 1)), key=lambda pair: pair[1])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_unconfigure(self) -> None:
        if os.getpid() == self._pid:
            counts = {"passed": self._num_passed, "failed": list(self._failed), "slowest": self._slowest}
            self._file.write_text(json.dumps(counts))
