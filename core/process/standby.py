"""The standby's side: prepare the engine that may be needed, and wait until it is.

A standby is an engine process whose first message is Prepare instead of Start. It has no socket and answers no client.
If memory runs out, the kernel kills it before the engine.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from core.process.prepare import Prepared, Report, prepare, prepare_imports
from ipc.wire.start_messages import Prepare

_OOM_SCORE = Path("/proc/self/oom_score_adj")
_FIRST_TO_DIE = "1000"


def prepare_standby(what: Prepare, report: Report) -> Prepared | None:
    """Prepare an engine as far as Prepare requests; None: only imports were requested. Errors: those of a start."""
    if what.loads_model:
        return prepare(what.config, report)
    prepare_imports(what.config, report)
    return None


@contextlib.contextmanager
def dying_first() -> Iterator[None]:
    """Until the end of this context, make the kernel kill this process first if memory runs out.

    Systems that do not allow that leave the setting unchanged.
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
