"""OutputWatch: each step's output against its plan, as core/execution/plan.py describes them."""

from collections import deque

import numpy as np

from core.execution.executor import ModelInfo
from core.execution.plan import FAILED_TOKEN, NO_TOKEN, LogprobColumns, ModelRunnerOutput, SchedulerOutput


class BrokenContractError(Exception):
    """The executor broke its contract; the text says how, with the numbers."""


class OutputWatch:
    """A StepWatcher that raises BrokenContractError for the first output that does not fit its plan."""

    def __init__(self, info: ModelInfo) -> None:
        self._vocab_size = info.vocab_size
        self._plans: deque[SchedulerOutput] = deque()

    def begin(self, plan: SchedulerOutput) -> None:
        """Keep the plan until its output comes."""
        self._plans.append(plan)

    def end(self, output: ModelRunnerOutput) -> None:
        """Check the output of the oldest plan."""
        plan = self._plans.popleft()
        step, num_rows = plan.step, len(plan.rows)
        _expect(output.step == step, f"the output of step {step} has step number {output.step}")
        tokens = output.token_ids
        is_column = isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.ndim == 1
        _expect(is_column, f"step {step}: token_ids is not a column of int32: {type(tokens).__name__}")
        num_tokens = num_rows
        if output.counts is not None:
            _expect(len(output.counts) == num_rows, f"step {step}: {len(output.counts)} counts for {num_rows} rows")
            num_tokens = int(output.counts.sum())
        _expect(len(tokens) == num_tokens, f"step {step}: {len(tokens)} token ids, {num_tokens} expected")
        lowest = min(FAILED_TOKEN, NO_TOKEN)
        is_known = bool(((tokens >= lowest) & (tokens < self._vocab_size)).all())
        _expect(
            is_known, f"step {step}: token ids beyond {lowest} and the {self._vocab_size} of the vocabulary: {tokens}"
        )
        if output.logprobs is not None:
            self._check_logprobs(step, num_rows, output.logprobs)

    def _check_logprobs(self, step: int, num_rows: int, logprobs: LogprobColumns) -> None:
        lengths = [len(logprobs.rows), len(logprobs.positions), len(logprobs.counts), len(logprobs.ranks)]
        _expect(len(set(lengths)) == 1, f"step {step}: log probabilities in columns of {lengths} positions")
        entries = [int(logprobs.counts.sum()), len(logprobs.token_ids), len(logprobs.values)]
        _expect(
            len(set(entries)) == 1, f"step {step}: (sum of counts, token ids, values) of log probabilities: {entries}"
        )
        rows, ids = logprobs.rows, logprobs.token_ids
        _expect(bool(((rows >= 0) & (rows < num_rows)).all()), f"step {step}: log probabilities of rows {rows}")
        is_known = bool(((ids >= 0) & (ids < self._vocab_size)).all())
        _expect(is_known, f"step {step}: log probabilities of ids beyond the vocabulary: {ids}")
        _expect(not np.isnan(logprobs.values).any(), f"step {step}: log probabilities that are NaN")


def _expect(is_right: bool, text: str) -> None:
    if not is_right:
        raise BrokenContractError(text)
