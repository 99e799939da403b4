"""Parts of a played engine: an executor that can fail, and what the engine tells its clients."""

from core.border.reception import Served
from core.execution.executor import ModelInfo, StepHandle
from core.execution.plan import SchedulerOutput
from core.executors.fake import FakeExecutor, create
from ipc.options.config import EngineConfig
from ipc.wire.messages import (
    MAX_CLIENT_MESSAGE_BYTES,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Limits,
    ModelInformation,
    TokenizerFiles,
    Welcome,
)
from tests.core.driving import PagedExecutor

OWNER_TOKEN = b"o" * 16


class StepFailure(Exception):
    """The error of a faulty executor in the middle of a step."""


class FailingExecutor:
    """An executor that can be made to fail at its next step."""

    def __init__(self, executor: FakeExecutor | PagedExecutor) -> None:
        self.info = executor.info
        self.fails = False
        self._execute = executor.execute

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        if self.fails:
            raise StepFailure("the played executor fails")
        return self._execute(plan)


def ready_executor(config: EngineConfig) -> FakeExecutor:
    executor = create(config)
    executor.initialize_cache(config)
    return executor


def served(config: EngineConfig, info: ModelInfo, generation: int, lease_ms: int) -> Served:
    """Return what core/process/start.py would have the engine tell its clients."""
    max_model_len = config.max_model_len or 0
    limits = Limits(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_message_bytes=MAX_CLIENT_MESSAGE_BYTES,
        max_num_queued_requests=config.max_num_queued_requests,
        max_num_queued_tokens=config.max_num_queued_tokens,
        max_client_bytes=config.max_client_bytes,
        heartbeat_ms=lease_ms // 3,
        lease_ms=lease_ms,
        max_logprobs=config.max_logprobs,
    )
    welcome = Welcome(
        PROTOCOL_MAJOR,
        PROTOCOL_MINOR,
        "played",
        f"engine {generation}",
        generation,
        b"",
        info.name,
        info.fingerprint,
        "",
        info.numerics,
        info.vocab_size,
        limits,
    )
    model = ModelInformation(
        0,
        info.name,
        info.fingerprint,
        info.numerics,
        "fake",
        info.dtype,
        info.vocab_size,
        [],
        max_model_len,
        1,
        1,
        1,
        1,
        True,
    )
    return Served(welcome, TokenizerFiles(0, "", {}), model, OWNER_TOKEN, config.client_weights)
