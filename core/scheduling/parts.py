"""SchedulerParts: what the scheduler's collaborators work on together."""

from typing import NamedTuple

from core.batch.batch import Batch
from core.scheduling.outputs import OutputCollector
from core.scheduling.policies import Policy
from core.scheduling.stats import SchedulerStats
from core.scheduling.waiting_queue import WaitingQueue
from ipc.options.resolved import ResolvedConfig


class SchedulerParts(NamedTuple):
    """The config, and the parts of one scheduler that several of its collaborators change.

    The scheduler creates them.
    """

    config: ResolvedConfig
    batch: Batch
    waiting: WaitingQueue
    policy: Policy
    outputs: OutputCollector
    stats: SchedulerStats
