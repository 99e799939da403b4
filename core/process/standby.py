"""The standby's side of its life: prepare the engine that may be needed, and wait until it is.

A standby is an engine process whose first message is Prepare and not Start. It has no socket and answers nobody. The
kernel kills it before the engine when memory runs out.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from core.process.prepare import Prepared, Report, prepare, prepare_imports
from ipc.wire.start_messages import Prepare

_OOM_SCORE = Path("/proc/self/oom_score_adj")
_FIRST_TO_DIE = "1000"


def prepare_standby(what: Prepare, report: Report) -> Prepared | None:
    """Prepare an engine as far as Prepare says; None: only imports were asked for. Errors: those of a start."""
    if what.loads_model:
        return prepare(what.config, report)
    prepare_imports(what.config, report)
    return None


@contextlib.contextmanager
def dying_first() -> Iterator[None]:
    """Have the kernel kill this process before others while memory is short, until the end of this context.

    Systems that do not let a process choose leave it as it is.
    """
    before = ""
    with contextlib.suppress(OSError):
        before = _OOM_SCORE.read_text()
        _OOM_SCORE.write_text(_FIRST_TO_DIE)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _OOM_SCORE.write_text(before)
