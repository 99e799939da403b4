"""CapturedEngine: an EngineCore whose inputs and decisions are logged from outside, without changing the step.

A replay is also a capture: the same inputs go into a CapturedEngine whose log compares instead of writing.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from core import log
from core.capture.early_copies import EarlyCopies
from core.capture.packed_steps import PACKED_TAG, digest_of, is_plain, pack_head, step_times
from core.capture.records import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    MAGIC,
    NO_RESULT,
    Checkpoint,
    Header,
    Input,
    Step,
    encode_config,
)
from core.capture.restore import restore
from core.capture.snapshot import CopySpace, Snapshot
from core.capture.state_classes import UnknownObjectError
from core.capture.writer import CaptureWriter, open_capture
from core.engine import EngineCore
from core.execution.executor import Executor, ModelInfo
from core.execution.pipeline import StepWatcher
from core.execution.plan import (
    LogprobColumns,
    ModelRunnerOutput,
    PooledColumns,
    SchedulerOutput,
    decided_fields,
    encode_fields,
)
from core.inputs import EngineInput, EngineReply
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import NO_INT32S, Int32s

_REMOVED, _ROWS, _COUNTS = map(
    SchedulerOutput.__struct_fields__.index, ("removed_rows", "rows", "num_scheduled_tokens")
)


class CaptureLog(Protocol):
    """Receives the records of a capture."""

    def add(self, record: Input | Step) -> None:
        """Handle the next record."""

    @property
    def wants_checkpoint(self) -> bool:
        """Return whether a checkpoint is due. Called after each step."""

    def add_checkpoint(self, snapshot: Snapshot, num_steps: int, num_inputs: int) -> None:
        """Handle the engine's state after the last record; see Checkpoint."""


@runtime_checkable
class PackedLog(CaptureLog, Protocol):
    """A log that accepts plain steps in packed form (core/capture/packed_steps.py), which costs the engine less."""

    sequence: int  # of the last record

    def add_packed(self, now_ns: int, checked: bytes) -> None:
        """Handle the next record, a packed step: pack_head() and the columns. now_ns: the step's clock value."""


class CapturedEngine:
    """An EngineCore that is logged from its first step on. It has EngineCore's interface.

    log: gets each step's inputs, then the step. watchers: called for each step, in addition to this object. received:
    returns when each message of the next inbox was received, in ns; None = unknown. copies_early: whether a checkpoint
    may come some steps after it is due, so that no step takes long.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        executor: Executor,
        log: CaptureLog,
        epoch: int = 0,
        *,
        watchers: Sequence[StepWatcher] = (),
        received: Callable[[], Sequence[int]] | None = None,
        copies_early: bool = False,
    ) -> None:
        self._log = log
        self._packed_log = log if isinstance(log, PackedLog) else None
        self._received = received
        self._num_steps = self._num_inputs = 0
        self._can_checkpoint = True
        self._space = CopySpace()
        self._copies_early = copies_early
        self._early: EarlyCopies | None = None  # for the checkpoint that is due
        self._last_rows = self._last_counts = b""  # of the last plan
        self._planned_ns = self._result_ns = 0  # of the running step, like everything below
        self._plan: SchedulerOutput | None = None
        self._added: list[tuple[int, int, int, int]] = []  # of the plan
        self._result: ModelRunnerOutput | None = None
        self.engine = EngineCore(config, executor, epoch, [*watchers, self])

    @property
    def has_work(self) -> bool:
        """See EngineCore.has_work."""
        return self.engine.has_work

    @property
    def has_unfinished(self) -> bool:
        """See EngineCore.has_unfinished."""
        return self.engine.has_unfinished

    def count_waiting(self) -> tuple[int, int]:
        """See EngineCore.count_waiting."""
        return self.engine.count_waiting()

    def step(self, inbox: Sequence[tuple[int, EngineInput]], now_ns: int) -> list[tuple[int, EngineReply]]:
        """Run EngineCore.step and log it. A step that raises is logged too, with its error."""
        if inbox:
            received = [0] * len(inbox) if self._received is None else self._received()
            for (client, message), received_ns in zip(inbox, received, strict=True):
                self._log.add(Input(client, message, received_ns))
        self._planned_ns = self._result_ns = 0
        self._begin_ns = time.monotonic_ns()
        try:
            replies = self.engine.step(inbox, now_ns)
        except Exception as error:
            self._log.add(self._record(now_ns, f"{type(error).__name__}: {error}"))
            raise
        if self._packed_log is not None and is_plain(self._plan, self._result):
            self._pack(self._packed_log, now_ns)
        else:
            self._log.add(self._record(now_ns))
        self._plan = self._result = None  # frees their memory for the next step's
        self._num_steps += 1
        self._num_inputs += len(inbox)
        if self._log.wants_checkpoint and self._can_checkpoint and self._is_prepared():
            self._checkpoint()
        return replies

    def _is_prepared(self) -> bool:
        """Return whether a checkpoint can be made now. If not, do part of the work that makes it short."""
        if not self._copies_early:
            return True
        if self._early is None:
            self._early = EarlyCopies(self.engine.scheduler.waiting.entries())
        elif not self._early.is_done:
            self._early.copy_some()
        return self._early.is_done

    def _checkpoint(self) -> None:
        early, self._early = self._early, None
        try:
            snapshot = Snapshot(self.engine.state(), self._space, early)
        except UnknownObjectError as error:  # for a scheduler with objects that are not ours
            self._can_checkpoint = False
            log.say(f"engine-core: this engine cannot make checkpoints: {error}")
            return
        self._log.add_checkpoint(snapshot, self._num_steps, self._num_inputs)
        self.write_columns()

    def write_columns(self) -> None:
        """Write the next step's rows and counts in full, because a replay may start with it."""
        self._last_rows = self._last_counts = b""

    def start_at(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of an engine with the same config. Call this before the first step.

        Errors: CaptureFileError.
        """
        self.go_on(restore(checkpoint.state), checkpoint)

    def go_on(self, state: list[Any], checkpoint: Checkpoint) -> None:
        """Continue from a state made from a checkpoint's state."""
        self.engine.take_over(state)
        self._num_steps, self._num_inputs = checkpoint.num_steps, checkpoint.num_inputs

    def begin(self, plan: SchedulerOutput) -> None:
        """Record the plan inside the step, because requests that the step ends leave the table before it returns."""
        self._plan = plan
        self._planned_ns = time.monotonic_ns()
        if plan.added or plan.added_pooling:
            table = self.engine.scheduler.table
            self._added = [
                (new.row, int(table.client[new.row]), int(table.number[new.row]), new.num_computed_tokens)
                for new in plan.starts
            ]
        elif self._added:
            self._added = []

    def end(self, output: ModelRunnerOutput) -> None:
        """Record the result of a step."""
        self._result = output
        self._result_ns = time.monotonic_ns()

    def _record(self, now_ns: int, error: str = "") -> Step:
        end_ns = time.monotonic_ns()
        scheduler, plan, result = self.engine.scheduler, self._plan, self._result
        digest = rows = counts = removed = b""
        if plan is not None:
            fields = decided_fields(plan)
            digest = digest_of(encode_fields(fields))
            removed, all_rows, all_counts = fields[_REMOVED], fields[_ROWS], fields[_COUNTS]
            rows = b"" if all_rows == self._last_rows else all_rows
            counts = b"" if all_counts == self._last_counts else all_counts
            self._last_rows, self._last_counts = all_rows, all_counts
        return Step(
            now_ns=now_ns,
            elapsed_ns=end_ns - self._begin_ns,
            digest=digest,
            rows=rows,
            counts=counts,
            removed_rows=removed,
            added=self._added if plan is not None else [],
            num_preemptions=scheduler.stats.num_preemptions,
            num_waiting=len(scheduler.waiting),
            num_free_blocks=scheduler.pool.num_free,
            result_step=NO_RESULT if result is None else result.step,
            tokens=b"" if result is None else _column(result.token_ids),
            error=error,
            token_counts=b"" if result is None or result.counts is None else _column(result.counts),
            draft_counts=b"" if result is None or result.draft_counts is None else _column(result.draft_counts),
            draft_tokens=b"" if result is None else _column(result.draft_token_ids),
            times=step_times(self._begin_ns, self._planned_ns, self._result_ns, end_ns),
            pooled=None if result is None or result.pooled is None else _pooled(result.pooled),
            **_candidates(None if result is None else result.candidates),
        )

    def _pack(self, log: PackedLog, now_ns: int) -> None:
        """Log a plain step that ends now. This runs in every step, so each line counts."""
        end_ns = time.monotonic_ns()
        scheduler, plan, result = self.engine.scheduler, self._plan, self._result
        step, removed, block_rows, block_ids, rows, counts = NO_RESULT, b"", b"", b"", b"", b""
        num_removed = num_blocks = num_rows = num_counts = 0  # bytes
        if plan is not None:
            step, rows, counts = plan.step, plan.rows.tobytes(), plan.num_scheduled_tokens.tobytes()
            if plan.removed_rows is not NO_INT32S:
                removed = plan.removed_rows.tobytes()
                num_removed = len(removed)
            if plan.block_rows is not NO_INT32S:
                block_rows, block_ids = plan.block_rows.tobytes(), plan.block_ids.tobytes()
                num_blocks = len(block_rows)
            if rows == self._last_rows:
                rows = b""
            else:
                self._last_rows, num_rows = rows, len(rows)
            if counts == self._last_counts:
                counts = b""
            else:
                self._last_counts, num_counts = counts, len(counts)
        result_step, tokens = (NO_RESULT, b"") if result is None else (result.step, result.token_ids.tobytes())
        head = pack_head(
            log.sequence + 1,
            PACKED_TAG,
            now_ns,
            self._begin_ns,
            self._planned_ns,
            self._result_ns,
            end_ns,
            step,
            result_step,
            scheduler.stats.num_preemptions,
            len(scheduler.waiting),
            scheduler.pool.num_free,
            num_removed,
            num_blocks,
            num_blocks,
            num_rows,
            num_counts,
            len(tokens),
        )
        log.add_packed(now_ns, b"".join((head, removed, block_rows, block_ids, rows, counts, tokens)))


def start_capture(
    path: str, config: ResolvedConfig, model: ModelInfo, engine_version: str, epoch: int
) -> CaptureWriter:
    """Return a writer to a new file with its header. Errors: ConfigError."""
    header = make_header(config, model, engine_version, epoch)
    return CaptureWriter(
        path, open_capture(path), header, config.capture_rotate_bytes, keep_files=config.capture_keep_files
    )


def make_header(config: ResolvedConfig, model: ModelInfo, engine_version: str, epoch: int) -> Header:
    """Return the header of a capture that starts now."""
    return Header(
        magic=MAGIC,
        major=FORMAT_MAJOR,
        minor=FORMAT_MINOR,
        engine_version=engine_version,
        config=encode_config(config),
        model=model,
        epoch=epoch,
        wall_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
    )


def capture_path(config: EngineConfig, epoch: int) -> str | None:
    """Return the capture file for this start, or None without capture.

    Restarted engines write to FILE.1, FILE.2, ...
    """
    return f"{config.capture}.{epoch}" if config.capture and epoch else config.capture


def _pooled(pooled: PooledColumns) -> tuple[bytes, bytes, bytes, bytes]:
    values = pooled.values.astype("<f4", copy=False).tobytes()
    return _column(pooled.rows), _column(pooled.counts), _column(pooled.widths), values


def _candidates(columns: LogprobColumns | None) -> dict[str, bytes]:
    """Return the candidates of beam searches as the fields of a Step."""
    if columns is None:
        return {}
    return {
        "candidate_rows": _column(columns.rows),
        "candidate_counts": _column(columns.counts),
        "candidate_tokens": _column(columns.token_ids),
        "candidate_values": columns.values.astype("<f4", copy=False).tobytes(),
    }


def _column(values: Int32s) -> bytes:
    return values.astype("<i4", copy=False).tobytes()
