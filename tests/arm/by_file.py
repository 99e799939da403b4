"""A plugin of pytest's for a run under QEMU: some variants only, and a line for each file of tests.

A run takes long, and one process for each file would start Python and torch thirty times.
"""

import os
from collections import Counter
from collections.abc import Generator

import pytest

from kernels.cpu.build import runnable_variants


class ByFile:
    """Counts the tests of the file that runs now, and says how many ended how, and their CPU time."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.found = Counter[str]()
        self.began_s = _cpu_seconds()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: its call if it has one, otherwise what kept it from running."""
        if report.when == "call" or report.outcome != "passed":
            self.found[report.outcome] += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, bool, bool]:
        """Say what was found after a file's last test."""
        result = yield
        if nextitem is None or nextitem.path != item.path:
            counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self.found.items()))
            used_s, self.began_s = _cpu_seconds() - self.began_s, _cpu_seconds()
            terminal = self.config.get_terminal_writer()
            terminal.line(f"\n{item.nodeid.split('::')[0]}: {counts}: {used_s:.0f} s of CPU time", flush=True)
            self.found.clear()
        return result


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --variants."""
    parser.addoption("--variants", nargs="+", default=runnable_variants(), help="of those this CPU runs; otherwise all")


def pytest_configure(config: pytest.Config) -> None:
    """Count from here: the CPU time until the first test is that of the first file."""
    config.pluginmanager.register(ByFile(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that have another variant as a parameter."""
    others = set(runnable_variants()) - set(config.option.variants)
    chosen: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        chosen[not others & {value for value in parameters if isinstance(value, str)}].append(item)
    config.hook.pytest_deselected(items=chosen[False])
    items[:] = chosen[True]


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
