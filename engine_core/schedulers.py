"""The names that a scheduler in another distribution uses; docs/schedulers.md explains them.

SCHEDULER_API is their version: the major number changes if schedulers break, the minor one if something is added.
"""

from core.batch.batch import Batch
from core.batch.request import Request
from core.batch.table import BatchTable, RequestStart
from core.execution.executor import ModelInfo
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.kv.block_pool import BlockPool
from core.scheduling.interface import SCHEDULER_API, CreateScheduler, SchedulerInterface
from core.scheduling.outputs import ClientOutput, OutputCollector
from core.scheduling.policies import BuildPolicy, Fair, Fcfs, Policy, Priority
from core.scheduling.scheduler import Scheduler
from core.scheduling.scheduler import create as create_scheduler
from core.scheduling.stats import SchedulerStats
from core.scheduling.waiting_lines import Line
from core.scheduling.waiting_queue import WaitingQueue
from ipc.errors import ConfigError
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import Bools, Ints

__all__ = [
    "SCHEDULER_API",
    "Batch",
    "BatchTable",
    "BlockPool",
    "Bools",
    "BuildPolicy",
    "ClientOutput",
    "ConfigError",
    "CreateScheduler",
    "Fair",
    "Fcfs",
    "Ints",
    "Line",
    "ModelInfo",
    "ModelRunnerOutput",
    "OutputCollector",
    "Policy",
    "Priority",
    "Request",
    "RequestStart",
    "ResolvedConfig",
    "Scheduler",
    "SchedulerInterface",
    "SchedulerOutput",
    "SchedulerStats",
    "WaitingQueue",
    "create_scheduler",
]
