"""Creates the scheduler that the config names: the built-in one, a plug-in, or an object of a module."""

from core.execution.executor import ModelInfo
from core.plug_ins import PlugInKind
from core.scheduling.interface import SCHEDULER_API, CreateScheduler, SchedulerInterface
from core.scheduling.scheduler import create
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.options.schedulers import BUILT_IN_SCHEDULER, SCHEDULERS

_PLUG_INS = PlugInKind("scheduler", SCHEDULERS, (BUILT_IN_SCHEDULER,), SCHEDULER_API, "create(config, info, epoch)")


def import_scheduler(config: EngineConfig) -> CreateScheduler:
    """Return what creates the config's scheduler, after importing it.

    Errors: ConfigError if there is no such scheduler, or if it does not fit this engine.
    """
    name = config.scheduler_cls
    if name == BUILT_IN_SCHEDULER:
        return create
    path, colon, attribute = name.partition(":")
    if not colon:
        found: CreateScheduler = _PLUG_INS.import_module(name).create
        return found
    given = getattr(_PLUG_INS.import_checked(path, f"scheduler {name!r}"), attribute, None)
    if not callable(given):
        raise ConfigError(f"scheduler_cls: the module {path} has no {attribute}(config, info, epoch)")
    create_given: CreateScheduler = given
    return create_given


def load_scheduler(config: ResolvedConfig, info: ModelInfo, epoch: int = 0) -> SchedulerInterface:
    """Create the config's scheduler, for a model. Errors: those of import_scheduler() and of the scheduler."""
    return import_scheduler(config)(config, info, epoch)
