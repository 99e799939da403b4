"""PoisonedExecutor: a fake executor that one kind of request damages, to test how engine and supervisor react."""

import os
import signal
from collections.abc import Callable

import msgspec

from core.execution.executor import FinishedStep, StepHandle
from core.execution.plan import FAILED_TOKEN, SchedulerOutput
from core.executors.paced import PacedExecutor
from ipc.options.config import EngineConfig


class PoisonError(Exception):
    """The exception of a poisoned step."""


def _raise() -> None:
    raise PoisonError("the request is poisoned")


def _run_out_of_memory() -> None:
    raise MemoryError("the request is poisoned")


def _hang() -> None:
    while True:
        pass


_KINDS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "row": lambda: None,  # only the row fails, like any row whose failure can be attributed
    "memory": _run_out_of_memory,
    "abort": os.abort,
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": _hang,
}


class PoisonedExecutor(PacedExecutor):
    """A PacedExecutor with a poison."""

    def __init__(self, config: EngineConfig) -> None:
        """Read the poison. Errors: ConfigError."""
        super().__init__(config)
        self._kind, token, position = self.options.poison.split(":")
        self._token, self._position = int(token), int(position)
        self._poisoned: set[int] = set()  # rows

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run one step, unless a poisoned row reaches its position in it."""
        self._poisoned -= set(plan.removed_rows.tolist())
        self._poisoned |= {new.row for new in plan.starts if int(new.token_ids[0]) == self._token}
        handle = super().execute(plan)
        bad = [
            index
            for index, row in enumerate(plan.rows.tolist())
            if row in self._poisoned and int(self._table.num_computed_tokens[row]) >= self._position
        ]
        if not bad:
            return handle
        _KINDS[self._kind]()
        output = handle.result()
        output.token_ids[bad] = FAILED_TOKEN
        failures = [(index, "the request is poisoned") for index in bad]
        return FinishedStep(msgspec.structs.replace(output, failures=failures))


def create(config: EngineConfig) -> PoisonedExecutor:
    """Create the executor for this config. Errors: ConfigError for a bad option."""
    return PoisonedExecutor(config)
