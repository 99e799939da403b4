"""RowsInTurn: the service of running rows where several steps are in flight and each has rows of its own."""

import numpy as np

from core.batch.batch import Batch
from core.scheduling.policies import Policy
from core.scheduling.preemption import Preemption
from core.scheduling.running_rows import RunningRows
from core.scheduling.waiting_queue import WaitingQueue
from ipc.options.config import EngineConfig
from ipc.options.workers import most_in_flight
from ipc.tables.arrays import Ints, Rows
from ipc.tables.rounding import ceil_div


class RowsInTurn(RunningRows):
    """Service of running rows by the stages of a pipeline.

    The first stage needs a row's last token, which the last stage samples. So a row gets nothing while a step in flight
    samples its next token, and each step takes its share of the rows that decode, so that the other steps have some.
    The chunks of a prompt need no token; they follow one another at once.
    """

    def __init__(
        self, config: EngineConfig, batch: Batch, waiting: WaitingQueue, policy: Policy, preemption: Preemption
    ) -> None:
        super().__init__(config, batch, waiting, policy, preemption)
        self._num_steps = most_in_flight(config)

    def _leave_out(self, rows: Rows, wanted: Ints, placeholders: Ints) -> None:
        wanted[placeholders > 0] = 0
        decoding = np.flatnonzero(wanted == 1)  # and not held for want of blocks: else nobody might have a turn
        wanted[decoding[ceil_div(len(rows), self._num_steps) :]] = 0


def running_rows(
    config: EngineConfig, batch: Batch, waiting: WaitingQueue, policy: Policy, preemption: Preemption
) -> RunningRows:
    """Return the service of running rows that this config needs."""
    kind = RunningRows if config.pipeline_parallel_size == 1 else RowsInTurn
    return kind(config, batch, waiting, policy, preemption)
