"""A pytest plugin for environments without torch: what cannot import it, or what is installed with it, is skipped."""

import re
import sys
from collections.abc import Generator

import pytest

from tests.pythons.left_out import LEFT_OUT

_NAMES = "|".join(sorted(LEFT_OUT))
_MISSING = re.compile(rf"No module named '(?:{_NAMES})\b|needs (?:{_NAMES}), which is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file that cannot be imported, and forget the half of it that was, for files that import from it."""
    report = yield
    if report.failed and (missing := _MISSING.search(str(report.longrepr))):
        sys.modules.pop(".".join(collector.path.relative_to(collector.config.rootpath).with_suffix("").parts), None)
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, missing[0])
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that cannot import it, itself or in a process that it starts."""
    report = yield
    if report.failed and (missing := _MISSING.search(str(report.longrepr))):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1], missing[0])
    return report
