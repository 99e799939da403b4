"""The recorded executor: yields the tokens of a capture, step by step. It needs no model and no torch."""

from typing import NamedTuple

import numpy as np

from core.capture.records import Step
from core.execution.executor import Costs, ModelInfo, StepCosts, StepHandle
from core.execution.plan import LogprobColumns, ModelRunnerOutput, PooledColumns, SchedulerOutput
from core.grammars.grammars import Grammars
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import Int32s


class NotRecordedError(Exception):
    """Error: the capture has no tokens for a plan, because this engine decided differently from the captured one."""


class RecordedExecutor:
    """An executor that replays a capture. info: the captured engine's model."""

    adapters = None  # its tokens are recorded

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.grammars = Grammars(dict, info.vocab_size, info.eos_token_ids)  # its tokens are recorded
        self._step: Step | None = None

    def feed(self, step: Step) -> None:
        """Set the step that is replayed next."""
        self._step = step

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """Return the number of blocks as if each token took one byte."""
        return memory_bytes // block_size

    def cache_memory_bytes(self) -> int | None:
        """Return None: there is no device."""
        return None

    def initialize_cache(self, config: ResolvedConfig) -> None:
        """Do nothing: there is no KV cache."""

    def measure_costs(self) -> Costs:
        """Return 1 and 1: the capture's config has the costs, or predates these options and needs none."""
        return Costs(1, 1)

    def measure_steps(self) -> StepCosts:
        """Return nothing: the capture's config has the durations."""
        return StepCosts()

    def warm_up(self) -> int:
        """Return 0: nothing is computed."""
        return 0

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Return a handle that reads the plan's tokens from the capture when they are taken."""
        return _Recorded(self, plan)

    def tokens_of(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Return the plan's output from the step passed to feed() last. Errors: NotRecordedError."""
        step, num_rows = self._step, len(plan.rows)
        if step is not None and step.result_step == plan.step:
            counts, draft_counts = _int32s(step.token_counts), _int32s(step.draft_counts)
            if _fits(step.tokens, counts, num_rows) and _fits(step.draft_tokens, draft_counts, num_rows, none=0):
                return ModelRunnerOutput(
                    plan.step,
                    _int32s(step.tokens),
                    counts=counts if len(counts) else None,
                    draft_counts=draft_counts if len(draft_counts) else None,
                    draft_token_ids=_int32s(step.draft_tokens),
                    pooled=_pooled(step),
                    candidates=_candidates(step, num_rows),
                )
        raise NotRecordedError(f"the capture has no tokens for the {num_rows} rows of plan {plan.step}")

    def prepare_ahead(self) -> bool:
        """Return False: there is nothing to prepare."""
        return False

    def close(self) -> None:
        """Do nothing: no resources are held."""


def _int32s(column: bytes) -> Int32s:
    return np.frombuffer(column, "<i4").astype(np.int32, copy=False)


def _pooled(step: Step) -> PooledColumns | None:
    if step.pooled is None:
        return None
    rows, counts, widths, values = step.pooled
    floats = np.frombuffer(values, "<f4").astype(np.float32, copy=False)
    return PooledColumns(_int32s(rows), _int32s(counts), _int32s(widths), floats)


def _candidates(step: Step, num_rows: int) -> LogprobColumns | None:
    """Return the candidates of beam searches, or None. Errors: NotRecordedError if they do not fit the plan."""
    rows, counts, token_ids = map(_int32s, (step.candidate_rows, step.candidate_counts, step.candidate_tokens))
    if not len(rows):
        return None
    values = np.frombuffer(step.candidate_values, "<f4").astype(np.float32, copy=False)
    fits = len(rows) == len(counts) and len(token_ids) == len(values) == int(counts.sum())
    if not fits or int(counts.min()) < 0 or not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
        raise NotRecordedError(f"the candidates of step {step.result_step} do not fit the {num_rows} rows of its plan")
    none = np.zeros(len(rows), np.int32)
    return LogprobColumns(rows, none, counts, none, token_ids, values)


def _fits(values: bytes, counts: Int32s, num_rows: int, none: int = 1) -> bool:
    """Return whether the values match counts [num_rows], or, without counts, `none` values per row."""
    if not len(counts):
        return len(values) == 4 * none * num_rows
    return len(counts) == num_rows and int(counts.min()) >= 0 and len(values) == 4 * int(counts.sum())


class _Recorded(NamedTuple):
    executor: RecordedExecutor
    plan: SchedulerOutput

    def result(self) -> ModelRunnerOutput:
        return self.executor.tokens_of(self.plan)
