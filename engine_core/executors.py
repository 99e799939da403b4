"""The names that an executor in another distribution uses; docs/executors.md explains them.

EXECUTOR_API is their version: the major number changes if executors break, the minor one if something is added.
"""

from core.execution.executor import (
    EXECUTOR_API,
    Costs,
    Executor,
    FinishedStep,
    ModelInfo,
    StepCosts,
    StepHandle,
)
from core.execution.plan import (
    FAILED_TOKEN,
    NO_TOKEN,
    LogprobColumns,
    ModelRunnerOutput,
    NewPooling,
    NewRow,
    PooledColumns,
    SchedulerOutput,
)
from core.execution.runner_table import RunnerTable
from core.executors.fake import FakeExecutor
from core.executors.fake_options import FakeOptions
from core.executors.local import LocalExecutor
from core.grammars.grammars import Grammars, model_grammars
from ipc.errors import ConfigError, OutOfMemoryError
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig

__all__ = [
    "EXECUTOR_API",
    "FAILED_TOKEN",
    "NO_TOKEN",
    "ConfigError",
    "Costs",
    "EngineConfig",
    "Executor",
    "FakeExecutor",
    "FakeOptions",
    "FinishedStep",
    "Grammars",
    "LocalExecutor",
    "LogprobColumns",
    "ModelInfo",
    "ModelRunnerOutput",
    "NewPooling",
    "NewRow",
    "OutOfMemoryError",
    "PooledColumns",
    "ResolvedConfig",
    "RunnerTable",
    "SchedulerOutput",
    "StepCosts",
    "StepHandle",
    "model_grammars",
]
