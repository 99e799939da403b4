"""A capture run again through the engine core, step by step, with recorded tokens or with the model."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import msgspec
import numpy as np

from core.batch.table import BatchTable
from core.border.validation import validate_request
from core.capture.bounds import untrusted_file
from core.capture.engine import CapturedEngine
from core.capture.file import CaptureFile, Place, Turn
from core.capture.recorded_executor import RecordedExecutor
from core.capture.records import Header, Input, OtherModelError, Step, decode_config
from core.capture.snapshot import Snapshot
from core.engine import EngineCore
from core.execution.executor import Executor, StepHandle, UpdatesWeights
from core.execution.pipeline import StepWatcher
from core.execution.plan import NO_TOKEN, ModelRunnerOutput, SchedulerOutput
from core.executors.by_name import load_executor
from core.inputs import BlocksArrived, EngineReply, NewWeights
from ipc.errors import CaptureFileError, InvalidRequestError
from ipc.options.resolved import ResolvedConfig
from ipc.options.workers import in_one_process
from ipc.tables.columns import unpack_numbers
from ipc.wire.feature_messages import without_ids
from ipc.wire.messages import DECODE_ERRORS, Abort, Submission
from ipc.wire.weights_messages import WeightsMark
from tools.commands.replay.differences import Batch, Difference, find_difference

OnTurn = Callable[[Turn, Sequence[tuple[int, EngineReply]]], None]


class Rerun(msgspec.Struct, frozen=True):
    """The totals of a run of a capture's steps."""

    num_steps: int  # replayed, including the one that differs
    num_requests: int
    num_aborted: int  # requests named in an Abort
    num_tokens: int  # sampled and delivered
    num_preemptions: int
    num_cached_tokens: int
    engine_error: str  # exception of the captured engine that ended the capture
    difference: Difference | None


class _Comparison:
    """The log of the replaying engine: keeps the last step until it has been compared."""

    step: Step
    wants_checkpoint = False

    def add(self, record: Input | Step) -> None:
        if isinstance(record, Step):
            self.step = record

    def add_checkpoint(self, snapshot: Snapshot, num_steps: int, num_inputs: int) -> None:
        raise AssertionError("not used")


def recorded_executor(file: CaptureFile) -> RecordedExecutor:
    """Return an executor whose tokens are those of the capture."""
    return RecordedExecutor(file.header.model)


def real_executor(
    file: CaptureFile,
    model: str | None,
    modules: Mapping[str, str] | None = None,
    mmproj: str | None = None,
) -> tuple[ResolvedConfig, Executor]:
    """Load the captured engine's model; return (config, executor). model, mmproj: paths on this machine, None = as in
    the capture.

    modules: paths of its adapters by name, in addition to those that it loaded at its start. Errors: OtherModelError;
    ModelFileError, OutOfMemoryError.
    """
    config = replay_config(file.header)
    moved = {name: path for name, path in (("model", model), ("mmproj", mmproj)) if path is not None}
    config = msgspec.structs.replace(config, **moved)
    if modules:
        config = msgspec.structs.replace(config, lora_modules={**config.lora_modules, **modules})
    executor = load_executor(in_one_process(config))
    recorded, found = file.header.model, executor.info
    if found.fingerprint != recorded.fingerprint:
        executor.close()
        raise OtherModelError(
            f"the capture is of {recorded.name} with fingerprint {recorded.fingerprint:.16}, numerics "
            f"{recorded.numerics}, and this is {found.name} with {found.fingerprint:.16}, {found.numerics}: weights, "
            f"dtype, kernels or torch differ; give the capture's own model with --model"
        )
    executor.initialize_cache(in_one_process(config))
    return config, executor


def replay_config(header: Header) -> ResolvedConfig:
    """Return the captured engine's config. Errors: OtherModelError for options that this version does not have."""
    try:
        return decode_config(header)
    except DECODE_ERRORS as error:
        raise OtherModelError(
            f"the capture was written by engine-core {header.engine_version} with options that this version does not "
            f"have: {error}"
        ) from None


class TableWatcher(StepWatcher, Protocol):
    """A watcher that reads the rows of the batch table. table: set before the first step."""

    table: BatchTable


class Replay:
    """A capture's engine, whose steps run again from the beginning of the file or from a checkpoint in it.

    config: the engine's. start: a checkpoint of the file; None: the file's beginning. watcher: gets every plan.
    weights: paths of those that the engine got while it ran. Errors: CaptureFileError for impossible options or an
    impossible state; OtherModelError for options that this version does not have.
    """

    def __init__(
        self,
        file: CaptureFile,
        config: ResolvedConfig,
        executor: Executor,
        start: Place | None = None,
        *,
        watcher: TableWatcher | None = None,
        weights: Sequence[str] = (),
    ) -> None:
        self._file, self._log = file, _Comparison()
        self._max_logprobs = replay_config(file.header).max_logprobs
        self._executor = executor if isinstance(executor, RecordedExecutor) else LostSteps(executor, weights)
        self._start = file.checkpoints[0] if start is None and file.begins_inside else start
        try:
            watchers = [watcher] if watcher else []
            self._captured = CapturedEngine(
                config, cast(Executor, self._executor), self._log, file.header.epoch, watchers=watchers
            )
        except Exception as error:  # any exception: the options come from the file
            raise CaptureFileError(f"{file.path}: its options are impossible: {error!r}") from None
        self._batch = Batch()
        if self._start is not None:
            with untrusted_file(file.path):
                self._captured.start_at(file.checkpoint(self._start))
                self._batch = Batch.of(self.engine)
        if watcher is not None:
            watcher.table = self.engine.scheduler.table

    @property
    def engine(self) -> EngineCore:
        """Return the engine in its state after the steps so far."""
        return self._captured.engine

    def steps(self) -> Iterator[tuple[Turn, Difference | None, Sequence[tuple[int, EngineReply]]]]:
        """Run the steps in order; yield each one, its difference from the recorded one, and the engine's replies.

        The last one yielded differs, or ended the captured engine, or is the last in the file.
        """
        for turn in self._file.turns(self._start):
            is_recorded = isinstance(self._executor, RecordedExecutor)
            if isinstance(self._executor, LostSteps):
                self._executor.prepare_all(message.mark for _, message in turn.inbox if isinstance(message, NewWeights))
            _check_inputs(self._file, turn, self._max_logprobs, has_features=is_recorded)
            with untrusted_file(self._file.path) if is_recorded else contextlib.nullcontext():
                difference, replies = self._step(turn)
            yield turn, difference, replies
            if difference is not None or turn.step.error:
                return

    def _step(self, turn: Turn) -> tuple[Difference | None, Sequence[tuple[int, EngineReply]]]:
        if turn.has_columns:
            self._captured.write_columns()
        self._executor.feed(turn.step)
        replies: Sequence[tuple[int, EngineReply]] = ()
        with contextlib.suppress(Exception):  # the engine has stored the exception in its record
            replies = self._captured.step(turn.inbox, turn.step.now_ns)
        return find_difference(turn, self._log.step, self._batch, replies), replies


def rerun(
    file: CaptureFile,
    config: ResolvedConfig,
    executor: Executor,
    *,
    on_turn: OnTurn | None = None,
    watcher: TableWatcher | None = None,
    start: Place | None = None,
    weights: Sequence[str] = (),
) -> Rerun:
    """Run every step up to the first difference.

    on_turn: called with each turn that was equal, and the engine's replies. watcher, start, weights: see Replay.
    Errors: CaptureFileError for records that no engine can have written.
    """
    replay = Replay(file, config, executor, start, watcher=watcher, weights=weights)
    difference, num_steps, engine_error = None, 0, ""
    num_requests = num_aborted = 0
    for turn, difference, replies in replay.steps():
        num_steps += 1
        num_requests += sum(isinstance(message, Submission) for _, message in turn.inbox)
        num_aborted += sum(
            len(unpack_numbers(message.numbers)) for _, message in turn.inbox if isinstance(message, Abort)
        )
        engine_error = turn.step.error
        if on_turn is not None and difference is None and not engine_error:
            on_turn(turn, replies)
    stats = replay.engine.scheduler.stats
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


def _check_inputs(file: CaptureFile, turn: Turn, max_logprobs: int, *, has_features: bool) -> None:
    """Check the inbox. has_features: the executor needs no features, or has those of the requests.

    Errors: CaptureFileError for a message that the IO thread would have refused; OtherModelError for features, and for
    KV blocks that no step has computed.
    """
    model = file.header.model
    for client, message in turn.inbox:
        if isinstance(message, BlocksArrived) and message.count and not has_features:
            raise OtherModelError(
                f"{file.path}: step {turn.step_index}: KV blocks came from files or from a peer, and a capture does "
                "not contain them: the model cannot run it again; leave out --mode full"
            )
        if not isinstance(message, Submission):
            continue
        where = f"{file.path}: step {turn.step_index}: request {message.number} of client {client}"
        if message.features:
            if not has_features:
                raise OtherModelError(
                    f"{where} has images or prompt_embeds, and a capture contains only their digests: the model "
                    "cannot run it again; leave out --mode full"
                )
            plain = without_ids(message.prompt_token_ids, message.features)
            message = msgspec.structs.replace(message, prompt_token_ids=plain)
        try:
            validate_request(
                message,
                vocab_size=model.vocab_size,
                max_model_len=model.max_model_len,
                max_logprobs=max_logprobs,
                tasks=model.tasks,
            )
        except InvalidRequestError as error:
            raise CaptureFileError(f"{where}: {error}") from None


# LostSteps: an executor for the replay of a capture whose engine lost steps with its workers: it drops them too.


class LostSteps:
    """A wrapper with the part of Executor that an EngineCore uses. A step without a result in the capture yields none
    here.

    A step's plan determines which rows it samples, so only a lost step can have tokens here and none in the capture. A
    step that computes a part of a prompt has none in either, and may have drafts.
    """

    def __init__(self, executor: Executor, weights: Sequence[str] = ()) -> None:
        """weights: paths of those that the captured engine got while it ran."""
        self.info, self.grammars = executor.info, executor.grammars
        self._executor, self._weights = executor, weights
        self._step: Step | None = None

    def feed(self, step: Step) -> None:
        """Set the step that is replayed next."""
        self._step = step

    def prepare_all(self, marks: Iterable[WeightsMark]) -> None:
        """Read these weights, which the next step may use. Errors: OtherModelError if their files are not given."""
        for mark in marks:
            paths = iter(self._weights if isinstance(self._executor, UpdatesWeights) else ())
            if not any(self.prepare_weights(path, mark.version) == mark for path in paths):
                raise OtherModelError(
                    f"the capture changes the weights to version {mark.version}, digest {mark.weights:.16}, and they "
                    "are not among the files given: name each with --weights"
                )

    def prepare_weights(self, path: str, version: int) -> WeightsMark:
        """Read weights; see UpdatesWeights."""
        assert isinstance(self._executor, UpdatesWeights), type(self._executor)
        return self._executor.prepare_weights(path, version)

    @property
    def expects_weights(self) -> bool:
        """Return False: weights are read when they are used."""
        return False

    def take_memory_ahead(self) -> bool:
        """Take no memory."""
        return False

    def pack_second_form(self) -> bool:
        """Pack nothing: no bit depends on it."""
        return False

    @property
    def why_fixed(self) -> str:
        """Return why the weights cannot change; see UpdatesWeights."""
        return self._executor.why_fixed if isinstance(self._executor, UpdatesWeights) else "its executor has none"

    def sleep(self, level: int) -> None:
        """Free memory; see UpdatesWeights."""
        if isinstance(self._executor, UpdatesWeights):
            self._executor.sleep(level)

    def wake_up(self) -> None:
        """Note that plans come again; see UpdatesWeights."""
        if isinstance(self._executor, UpdatesWeights):
            self._executor.wake_up()

    def use_weights(self, mark: WeightsMark) -> None:
        """Compute with these weights; see UpdatesWeights."""
        assert isinstance(self._executor, UpdatesWeights), type(self._executor)
        self._executor.use_weights(mark)

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Begin a step."""
        return _Handle(self, plan, self._executor.execute(plan))

    def output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Return the part of a plan's output that the captured engine received."""
        step = self._step
        if step is not None and step.result_step == plan.step and not _has_result(step):
            return ModelRunnerOutput(plan.step, np.frombuffer(step.tokens, "<i4").astype(np.int32))
        return output


def _has_result(step: Step) -> bool:
    """Return whether anything of a step's result arrived, not counting rows without tokens."""
    if step.token_counts or step.draft_counts or step.candidate_rows or step.pooled is not None:
        return True
    return bool((np.frombuffer(step.tokens, "<i4") != NO_TOKEN).any())


class _Handle(NamedTuple):
    steps: LostSteps
    plan: SchedulerOutput
    handle: StepHandle

    def result(self) -> ModelRunnerOutput:
        return self.steps.output(self.plan, self.handle.result())
