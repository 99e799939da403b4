"""StepTime: the duration of a step as a linear function of its plan, fitted to a capture's own steps."""

from typing import NamedTuple

import numpy as np

from core.batch.table import BatchTable
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from ipc.tables.arrays import Doubles, Ints

#: The parts of a step's time. A weight is never negative.
FEATURES = (
    "steps",
    "decoding rows",
    "prompt tokens",
    "KV tokens read by decoding rows",
    "KV tokens read by prompt tokens",
    "steps with prompts",
    "rows that sample",
    "blocks copied",
)
#: Of a pace, drawn together: what disturbs a machine often lasts as long.
STRETCH_S = 2.0
_LEAST_STRETCHES = 8  # of one pace: those of a short run are shorter, or all its paces would be as fast
_MAX_ROUNDS = 10 * len(FEATURES)


def features_of(plan: SchedulerOutput, table: BatchTable) -> Ints:
    """Return the FEATURES of a new plan, int64 [8]."""
    rows, counts = plan.rows.astype(np.int64), plan.num_scheduled_tokens.astype(np.int64)
    ends = table.num_computed_tokens[rows]
    is_prompt = counts > 1
    num_samples = int(np.count_nonzero(ends >= table.num_tokens[rows]))
    num_copies = len(plan.swapped_out_blocks) + len(plan.swapped_in_blocks)
    if not np.count_nonzero(is_prompt):
        return np.array((1, len(rows), 0, int(ends.sum()), 0, 0, num_samples, num_copies))
    num_prompt_tokens = int(counts[is_prompt].sum())
    read_by_prompts = counts * (ends - counts) + counts * (counts + 1) // 2
    return np.array(
        (
            1,
            len(rows) - int(is_prompt.sum()),
            num_prompt_tokens,
            int(ends[~is_prompt].sum()),
            int(read_by_prompts[is_prompt].sum()),
            int(num_prompt_tokens > 0),
            num_samples,
            num_copies,
        )
    )


def decoding_features(num_rows: int, num_read: int, count: int) -> Ints:
    """Return the FEATURES of `count` steps in which the same rows decode, int64 [count, 8].

    num_read: number of KV tokens that the first step reads.
    """
    features = np.tile(np.array((1, num_rows, 0, num_read, 0, 0, num_rows, 0)), (count, 1))
    features[:, 3] += num_rows * np.arange(count)
    return features


class FeatureWatcher:
    """A watcher of steps that keeps the features of the last plan. table: set once the engine exists."""

    table: BatchTable

    def __init__(self) -> None:
        self._features: Ints | None = None

    def begin(self, plan: SchedulerOutput) -> None:
        """Note the plan's features."""
        self._features = features_of(plan, self.table)

    def end(self, output: ModelRunnerOutput) -> None:
        """Do nothing: plans have everything needed."""

    def take(self) -> Ints | None:
        """Return the features of the plan since the last call, or None if there was none."""
        features, self._features = self._features, None
        return features


class Pace(NamedTuple):
    """How fast a machine was while it worked: when it had done how much. Both ascend from 0, float64 [n + 1], in ns.

    A step's deviation from the fit belongs to the time in which it ran: what disturbs a machine for a second makes a
    hundred short steps slow, or three long ones. So a simulated step takes as long as the machine took for as much
    work, whatever steps that was. After the end it begins again.
    """

    done: Doubles  # fitted durations, added up
    taken: Doubles  # measured ones

    @classmethod
    def of(cls, fitted: Doubles, measured: Doubles) -> "Pace":
        """Return the pace of consecutive steps with these durations [n], all above 0."""
        return cls(np.concatenate([[0.0], fitted.cumsum()]), np.concatenate([[0.0], measured.cumsum()]))

    def drawn(self, draw: np.random.Generator) -> "Pace":
        """Return stretches of this pace, each from any time on: together about as long as this one."""
        total = float(self.taken[-1])
        size = min(STRETCH_S * 1e9, total / _LEAST_STRETCHES)
        taken = np.concatenate([self.taken, total + self.taken[1:]])  # a stretch goes on at the beginning
        done = np.concatenate([self.done, self.done[-1] + self.done[1:]])
        pieces = list[Doubles]()
        for first in draw.uniform(0.0, total, round(total / size)).tolist():
            within = slice(np.searchsorted(taken, first, "right"), np.searchsorted(taken, first + size, "left"))
            times = np.concatenate([[first], taken[within], [first + size]])
            pieces.append(np.diff([np.interp(times, taken, done), times]))
        return Pace.of(*np.concatenate(pieces, axis=1))

    def times(self, done: Doubles) -> Doubles:
        """Return when the machine has done this much."""
        rounds, rest = np.divmod(done, self.done[-1])
        times: Doubles = rounds * self.taken[-1] + np.interp(rest, self.done, self.taken)
        return times


#: As fast as the fit says.
EVEN = Pace(np.array([0.0, 1.0]), np.array([0.0, 1.0]))


class StepTime(NamedTuple):
    """A fit. errors: |predicted / measured - 1| of the fitted steps."""

    weights: Doubles  # ns [8]
    most: Ints  # the largest value of each feature in the fitted steps [8]
    ratios: Doubles  # measured / predicted of each fitted step
    mean_error: float
    median_error: float
    pace: Pace = EVEN  # of the fitted steps

    def of(self, features: Ints) -> float:
        """Return the step's duration in ns."""
        weights: list[float] = self.weights.tolist()
        parts = [weight * count for weight, count in zip(weights, features.tolist(), strict=True)]
        return sum(parts, 0.0)

    def of_each(self, features: Ints) -> Doubles:
        """Return the duration of each step of features [n, 8], bit-identical to of()."""
        total = np.zeros(len(features))
        for weight, column in zip(self.weights.tolist(), features.T, strict=True):
            total += weight * column
        return total

    def num_uncovered(self, features: Ints) -> int:
        """Return how many steps of features [n, 8] have a feature beyond those of the fitted steps."""
        return int(np.count_nonzero(np.count_nonzero(features > self.most, axis=1)))


def fit(features: Ints, durations: Ints) -> StepTime:
    """Fit durations in ns [n > 0] to features [n, 8].

    Relative errors are minimized (weights 1 / duration), since for a latency short steps count as much as long ones.
    Then all weights are scaled so that the sum of the steps' times is the measured one.
    """
    measured = np.maximum(durations, 1).astype(np.float64)
    relative = features / measured[:, None]
    scale = np.maximum(np.linalg.norm(relative, axis=0), 1e-300)  # columns of length 1, whatever the unit of time
    weights = _non_negative(relative / scale, np.ones(len(measured))) / scale
    predicted = np.maximum(features @ weights, 1.0)
    factor = measured.sum() / predicted.sum()
    predicted *= factor
    ratios = measured / predicted
    errors = np.abs(1 / ratios - 1)
    most = features.max(axis=0)
    pace = Pace.of(predicted, measured)
    return StepTime(weights * factor, most, ratios, float(errors.mean()), float(np.median(errors)), pace)


def _non_negative(matrix: Doubles, wanted: Doubles) -> Doubles:
    """Return the x >= 0 with the smallest |matrix @ x - wanted| (Lawson and Hanson, 1974)."""
    count = matrix.shape[1]
    x, used = np.zeros(count), np.zeros(count, bool)
    for _ in range(_MAX_ROUNDS):
        gradient = matrix.T @ (wanted - matrix @ x)
        gradient[used] = 0.0
        best = int(gradient.argmax())
        if gradient[best] <= 1e-9 * np.linalg.norm(wanted):
            break
        used[best] = True
        while True:
            full = np.zeros(count)
            full[used] = np.linalg.lstsq(matrix[:, used], wanted, rcond=None)[0]
            if not used.any() or full[used].min() > 0:
                break
            falling = used & (full <= 0)
            step = (x[falling] / np.maximum(x[falling] - full[falling], 1e-300)).min()
            x = x + step * (full - x)
            used &= x > 1e-12
        x = full
    return x
