"""A capture run again through the engine core, step by step, with recorded tokens or with the model."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from core.batch.table import BatchTable
from core.border.validation import validate_request
from core.capture.engine import CapturedEngine
from core.capture.file import CaptureFile, Turn
from core.capture.recorded_executor import RecordedExecutor
from core.capture.records import Header, Input, Step, decode_config
from core.execution.executor import Executor
from core.execution.pipeline import StepWatcher
from core.executors.by_name import load_executor
from core.inputs import EngineReply
from ipc.config import EngineConfig
from ipc.errors import CaptureFileError, EngineCoreError, InvalidRequestError
from ipc.messages import DECODE_ERRORS, Abort, Submission, unpack_numbers
from tools.replay.differences import Batch, Difference, find_difference

OnTurn = Callable[[Turn, Sequence[tuple[int, EngineReply]]], None]


class OtherModelError(EngineCoreError):
    """The capture is sound, but the model, the engine's options or the engine of the replay differ from its own."""


class Rerun(msgspec.Struct, frozen=True):
    """The totals of a run of a capture's steps."""

    num_steps: int  # replayed, the one that differs included
    num_requests: int
    num_aborted: int  # requests named in an Abort
    num_tokens: int  # sampled and delivered
    num_preemptions: int
    num_cached_tokens: int
    engine_error: str  # exception of the captured engine, with which the capture ends
    difference: Difference | None


class _Comparison:
    """The log of the replaying engine: keeps the last step until it is compared."""

    step: Step

    def add(self, record: Input | Step) -> None:
        if isinstance(record, Step):
            self.step = record


def recorded_executor(file: CaptureFile) -> RecordedExecutor:
    """Return an executor whose tokens are those of the capture."""
    return RecordedExecutor(file.header.model)


def real_executor(file: CaptureFile, model: str | None) -> tuple[EngineConfig, Executor]:
    """Load the captured engine's model; return (config, executor). model: its path here, None = as in the capture.

    Errors: OtherModelError; ModelFileError, OutOfMemoryError.
    """
    config = replay_config(file.header)
    if model is not None:
        config = msgspec.structs.replace(config, model=model)
    executor = load_executor(config)
    recorded, found = file.header.model, executor.info
    if found.fingerprint != recorded.fingerprint:
        executor.close()
        raise OtherModelError(
            f"the capture is of {recorded.name} with fingerprint {recorded.fingerprint:.16}, numerics "
            f"{recorded.numerics}, and this is {found.name} with {found.fingerprint:.16}, {found.numerics}: weights, "
            f"dtype, kernels or torch differ; give the capture's own model with --model"
        )
    executor.initialize_cache(config)
    return config, executor


def replay_config(header: Header) -> EngineConfig:
    """Return the captured engine's config. Errors: OtherModelError for options that this version does not have."""
    try:
        return decode_config(header)
    except DECODE_ERRORS as error:
        raise OtherModelError(
            f"the capture was written by engine-core {header.engine_version} with options that are none here: {error}"
        ) from None


class TableWatcher(StepWatcher, Protocol):
    """A watcher that looks at the rows of the batch table. table: set before the first step."""

    table: BatchTable


def rerun(
    file: CaptureFile,
    config: EngineConfig,
    executor: Executor,
    *,
    on_turn: OnTurn | None = None,
    watcher: TableWatcher | None = None,
) -> Rerun:
    """Run every step, up to the first difference.

    on_turn: called with each turn that was equal, and the engine's replies. watcher: told of every plan.
    Errors: CaptureFileError for records that no engine can have written.
    """
    log = _Comparison()
    try:
        engine = CapturedEngine(config, executor, log, file.header.epoch, [watcher] if watcher else [])
    except Exception as error:  # any kind: the options come from the file
        raise CaptureFileError(f"{file.path}: no engine can have had its options: {error!r}") from None
    if watcher is not None:
        watcher.table = engine.engine.scheduler.table
    batch, difference, num_steps, engine_error = Batch(), None, 0, ""
    num_requests = num_aborted = 0
    for turn in file.turns():
        added, aborted = _check_inputs(file, turn)
        num_requests, num_aborted, num_steps = num_requests + added, num_aborted + aborted, num_steps + 1
        if isinstance(executor, RecordedExecutor):
            executor.feed(turn.step)
        replies: Sequence[tuple[int, EngineReply]] = ()
        with contextlib.suppress(Exception):  # the engine has noted the exception in its record
            replies = engine.step(turn.inbox, turn.step.now_ns)
        difference = find_difference(turn, log.step, batch, replies)
        engine_error = turn.step.error
        if difference is not None or engine_error:
            break
        if on_turn is not None:
            on_turn(turn, replies)
    stats = engine.engine.scheduler.stats
    return Rerun(
        num_steps=num_steps,
        num_requests=num_requests,
        num_aborted=num_aborted,
        num_tokens=stats.num_generation_tokens,
        num_preemptions=stats.num_preemptions,
        num_cached_tokens=stats.prefix_cache_hits,
        engine_error=engine_error,
        difference=difference,
    )


def _check_inputs(file: CaptureFile, turn: Turn) -> tuple[int, int]:
    """Return (requests, aborted requests) of the inbox.

    Errors: CaptureFileError for a message that the IO thread would have refused.
    """
    num_requests = num_aborted = 0
    model, max_logprobs = file.header.model, decode_config(file.header).max_logprobs
    for client, message in turn.inbox:
        if isinstance(message, Submission):
            num_requests += 1
            try:
                validate_request(
                    message,
                    vocab_size=model.vocab_size,
                    max_model_len=model.max_model_len,
                    max_logprobs=max_logprobs,
                    tasks=model.tasks,
                )
            except InvalidRequestError as error:
                where = f"{file.path}: step {turn.step_index}: request {message.number} of client {client}"
                raise CaptureFileError(f"{where}: {error}") from None
        elif isinstance(message, Abort):
            num_aborted += len(unpack_numbers(message.numbers))
    return num_requests, num_aborted
