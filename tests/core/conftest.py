"""What the tests of the core share."""

from collections.abc import Callable

import pytest

from core import log

_WRITTEN_S = 10.0


@pytest.fixture
def logged(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return what is on standard error since the last call, once the lines that the core has said are written: a thread
    of the log writes them, on a busy machine long after what they are about."""

    def read() -> str:
        log.flush(_WRITTEN_S)
        return capfd.readouterr().err

    return read
