"""The model runners of a group's ranks. The first one leads and samples; the others follow it."""

import time
from typing import Any

import numpy as np

from core.execution.executor import Costs
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.models.step import StepResult, TappedResult
from core.runner.assistant_drafter import AssistantDrafter
from core.runner.drafter import Drafter
from core.runner.model_runner import ModelRunner
from core.runner.step_durations import Clock
from core.runner.step_inputs import StepInputs
from core.workers.rank_channel import (
    Followers,
    Guess,
    HiddenOf,
    LogitsOf,
    Measured,
    Sampled,
    StatesOf,
    Trial,
    as_rows,
    as_tokens,
    next_order,
)
from ipc.machine.channel import Channel
from ipc.tables.arrays import NO_INT32S, AnyInts, Floats, Int32s, Ints


class LeadsTrials(ModelRunner):
    """The measuring part of a first rank's runner. The others compute the same."""

    def __init__(self, *arguments: Any, followers: Followers, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._followers = followers
        self._is_trial = False

    def forward(self, inputs: StepInputs) -> StepResult:
        """Run the model on a step's tokens, with all ranks."""
        if self._is_trial:
            self._followers.tell(Trial(len(inputs.token_ids), len(inputs.logits_rows)))
        return super().forward(inputs)

    def measure_costs(self) -> Costs:
        """Return the measured costs of restoring a preempted request."""
        self._is_trial = True
        costs = super().measure_costs()
        self._end_trial()
        return costs

    def measure_steps(self, used: Clock = time.perf_counter_ns) -> tuple[int, ...]:
        """Return the measured durations of steps."""
        self._is_trial = True
        durations = super().measure_steps(used)
        self._end_trial()
        return durations

    def measure_drafts(self, used: Clock = time.perf_counter_ns) -> int:
        """Return the measured duration of drafts for one row."""
        duration = super().measure_drafts(used)
        self._end_trial()
        return duration

    def _end_trial(self) -> None:
        self._is_trial = False
        self._followers.tell(Measured())


class LeadingRunner(LeadsTrials):
    """The runner of the first rank. It tells the others what to compute with it, and which tokens it has sampled."""

    _tables: AnyInts | None = None  # those of the last Guess

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if isinstance(self.drafter, AssistantDrafter):
            self.drafter.head.tell = self._tell_guess

    def _tell_guess(self, given: Floats, lengths: Ints, block_tables: AnyInts) -> None:
        """Let the others run the assistant's layers. The drafts of a chain have the same tables."""
        tables = b"" if block_tables is self._tables else block_tables.astype(np.int32, copy=False).tobytes()
        self._tables = block_tables
        self._followers.tell(Guess(given.tobytes(), lengths.astype(np.int64, copy=False).tobytes(), tables))

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step, send its tokens to the other ranks, and return its output."""
        output = super().execute(plan)
        counts = b"" if output.counts is None else output.counts.tobytes()
        self._followers.tell(Sampled(output.token_ids.tobytes(), counts))
        return output

    def forward(self, inputs: StepInputs) -> StepResult:
        """Run the model on a step's tokens, with all ranks."""
        return _LedResult(super().forward(inputs), self._followers)


class _LedResult:
    """A step's result. Further parts of it are computed by all ranks."""

    def __init__(self, result: StepResult, followers: Followers) -> None:
        self.logits, self.largest = result.logits, result.largest
        self._result, self._followers = result, followers

    def logits_of(self, rows: Ints) -> Floats:
        self._followers.tell(LogitsOf(rows.astype(np.int64, copy=False).tobytes()))
        return self._result.logits_of(rows)

    def hidden_of(self, rows: Ints) -> Floats:
        self._followers.tell(HiddenOf(rows.astype(np.int64, copy=False).tobytes()))
        return self._result.hidden_of(rows)

    def states_of(self, rows: Ints) -> Floats:
        assert isinstance(self._result, TappedResult), type(self._result)
        self._followers.tell(StatesOf(rows.astype(np.int64, copy=False).tobytes()))
        return self._result.states_of(rows)


class FollowsTrials(ModelRunner):
    """The measuring part of another rank's runner."""

    def __init__(self, *arguments: Any, leader: Channel, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._leader = leader

    def measure_costs(self) -> Costs:
        """Compute together with the first rank while it measures. Return the smallest costs."""
        self._obey_trials()
        return Costs(1, 1)

    def measure_steps(self, used: Clock = time.perf_counter_ns) -> tuple[int, ...]:
        """Compute together with the first rank while it measures. Return nothing."""
        self._obey_trials()
        return ()

    def measure_drafts(self, used: Clock = time.perf_counter_ns) -> int:
        """Compute together with the first rank while it measures. Return nothing."""
        self._obey_trials()
        return 0

    def _obey_trials(self) -> None:
        while isinstance(order := next_order(self._leader), Trial | Guess):
            if isinstance(order, Trial):
                self.forward(self._trial_inputs(order.num_tokens, order.num_samples))
            else:
                self.guess(order)
        assert isinstance(order, Measured), order

    def guess(self, order: Guess) -> None:
        """Run the rank's part of the assistant's layers."""
        raise AssertionError("only the last stage has an assistant")


class FollowingRunner(FollowsTrials):
    """The runner of another rank: a mirror of the batch that computes its part and appends the tokens that it receives.

    It has no sampling, grammars or drafts, but a part of an assistant.
    """

    _tables: Int32s = NO_INT32S  # of the last Guess that has any

    def __init__(self, *arguments: Any, drafter: Drafter | None = None, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "grammars": None, "pooler": None})
        self._assistant = drafter.head if isinstance(drafter, AssistantDrafter) else None

    def guess(self, order: Guess) -> None:
        """Run the rank's part of the assistant's layers."""
        assert self._assistant is not None, "a draft, but there is no assistant"
        lengths = as_rows(order.lengths)
        given = np.frombuffer(order.given, np.float32).reshape(len(lengths), -1)
        if order.tables:
            self._tables = as_tokens(order.tables).reshape(len(lengths), -1)
        self._assistant.run(given, lengths, self._tables, self.cache)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run this rank's part of one step. The output is not used."""
        self.apply_blocks(plan)
        self._feature_rows.apply(plan)
        if not len(plan.rows):  # it encodes or drops images only
            assert isinstance(next_order(self._leader), Sampled), "the first rank has sampled nothing"
            return ModelRunnerOutput(plan.step, NO_INT32S)
        self.model.wake()
        inputs = self.prepare(plan)
        sampled = self._obey(self.forward(inputs))
        if inputs.sample_rows is not None:
            self._append_runs(plan, inputs, as_tokens(sampled.tokens), as_tokens(sampled.counts))
        elif inputs.num_samples:
            self._append(inputs, as_tokens(sampled.tokens))
        return ModelRunnerOutput(plan.step, NO_INT32S)

    def _append(self, inputs: StepInputs, tokens: Int32s) -> None:
        if inputs.num_samples == len(inputs.rows) and min(tokens.tolist()) >= 0:
            self._inputs.append(inputs.rows, tokens)
        else:
            known = tokens >= 0
            self.table.append_tokens(inputs.rows[known], tokens[known])

    def _append_runs(self, plan: SchedulerOutput, inputs: StepInputs, tokens: Int32s, counts: Int32s) -> None:
        finite, owners = tokens >= 0, np.arange(len(counts)).repeat(counts)
        known = np.bincount(owners[finite], minlength=len(counts))
        going = known > 0
        self.table.append_tokens(inputs.rows[going], tokens[finite], known[going])
        self.accept(plan, counts)

    def _obey(self, result: StepResult) -> Sampled:
        """Carry out the first rank's orders for this step, and return the last one."""
        while True:
            match next_order(self._leader):
                case Sampled() as sampled:
                    return sampled
                case LogitsOf(rows):
                    result.logits_of(as_rows(rows))
                case HiddenOf(rows):
                    result.hidden_of(as_rows(rows))
                case Guess() as guess:
                    self.guess(guess)
                case StatesOf(rows):
                    assert isinstance(result, TappedResult), type(result)
                    result.states_of(as_rows(rows))
                case order:
                    raise AssertionError(f"{order} within a step")
