"""DraftRule: how many drafts, for which rows, are worth their cost in a step."""

from functools import lru_cache
from itertools import accumulate

import numpy as np

from ipc.tables.arrays import Doubles, Ints

#: A step with more tokens than this gets no drafts: above it, every token adds to the step's time.
LARGEST_STEP = 512
#: The most drafts in a step: each needs a row of logits, up to 1 MiB with the largest vocabularies.
MAX_STEP_DRAFTS = 128
#: Cost of a step with drafts in addition to its tokens: proposing, other inputs, verifying. In ns.
OVERHEAD_NS = 200_000
#: Factor for a bound on chances, because it is rounded in a different order from the value that it bounds.
_SLACK = 1 - 1e-9


class DraftRule:
    """The rule for one engine, from the measured durations of its steps.

    It maximizes the expected number of kept tokens per nanosecond of the step. It uses only integers and single
    floating-point operations, so that a replay on another machine decides the same.
    """

    #: Whether a source is also asked for drafts that follow a prompt, in the step that computes its end,
    #: or what a row computes again.
    after_prompts = False

    def __init__(
        self,
        step_ns: tuple[int, ...] = (),
        draft_ns: int = 0,
        alone_ns: tuple[int, ...] = (),
        *,
        loses_turn: bool = False,
    ) -> None:
        """step_ns: durations of steps of 1, 2, 4, 8, ... tokens; empty: drafts cost nothing.

        draft_ns: time to make the drafts, if it is more than a table lookup. loses_turn: a row with drafts gets nothing
        in the next step. alone_ns: like step_ns, but for steps in which all rows have drafts, so that there is no next
        step to overlap with; empty: the same as step_ns.
        """
        self._overhead_ns = OVERHEAD_NS + draft_ns
        self._is_free = not step_ns
        #: Whether a step with drafts is weighed together with the next one, in which its rows get nothing.
        self.weighs_pairs = loses_turn and not self._is_free
        self._costs, self._alone, self._least = _tables(step_ns or (1,), alone_ns)
        self._least_chance: Doubles | None = None  # the least chance that pays, for each number of tokens
        if self.weighs_pairs:
            self._least_chance = _least_chances(self._costs, self._alone, self._overhead_ns)

    def may_pay(self, num_tokens: int, chance: float) -> bool:
        """Return whether drafts may be worth their cost in a step of num_tokens tokens.

        chance: the highest chance of any row that its draft is right. A False answer must be cheap.
        """
        if not 0 < num_tokens <= LARGEST_STEP:
            return False
        if self._is_free:
            return True
        if self._least_chance is not None and chance < float(self._least_chance[num_tokens]):
            return False
        return chance * float(self._costs[num_tokens]) > num_tokens * float(self._least[num_tokens])

    def choose(self, num_tokens: int, chances: Doubles, counts: Ints, limit: int) -> Ints:
        """Return how many of counts [n] drafts each row gets, in a step that has num_tokens tokens already.

        chances [n]: that a draft is right if those before it are. limit: the most drafts of all rows together.
        """
        none = np.zeros(len(counts), np.int64)
        limit = min(limit, MAX_STEP_DRAFTS, int(counts.sum()))
        if limit <= 0:
            return none
        most = int(counts.max())
        gains = chances[:, None].repeat(most, 1).cumprod(1)
        gains[np.arange(most) >= counts[:, None]] = 0.0
        order = np.argsort(-gains, axis=None, kind="stable")[:limit]
        count = limit
        if not self._is_free:
            kept = num_tokens + gains.reshape(-1)[order].cumsum()
            sizes = slice(num_tokens + 1, num_tokens + 1 + limit)
            costs = self._costs[sizes]
            if self.weighs_pairs:  # the rows without drafts have the next step to themselves
                left = num_tokens - (order % most == 0).cumsum()
                kept, costs = kept + left, np.where(left > 0, costs + self._costs[left], self._alone[sizes])
            rates = kept / (costs + self._overhead_ns)
            count = int(rates.argmax()) + 1
            if float(rates[count - 1]) <= num_tokens / float(self._costs[num_tokens]):
                return none
        chosen: Ints = np.bincount(order[:count] // most, minlength=len(counts))
        return chosen

    def can_pay(self, most: int) -> bool:
        """Return whether up to `most` drafts per row, if all are right, are worth their cost in any small batch."""
        sizes = (1, 2, 4, 8, 16)
        return any(self.choose(size, np.ones(size), np.full(size, most), MAX_STEP_DRAFTS).any() for size in sizes)


class AllDrafts(DraftRule):
    """The rule for drafts that are worth any cost: as many as a step has room for, row after row."""

    def __init__(self, *, after_prompts: bool) -> None:
        super().__init__()
        self.after_prompts = after_prompts

    def may_pay(self, num_tokens: int, chance: float) -> bool:
        """Return whether there is a step at all."""
        return num_tokens > 0

    def choose(self, num_tokens: int, chances: Doubles, counts: Ints, limit: int) -> Ints:
        """Return counts [n], cut where the limit is reached."""
        before = counts.cumsum() - counts
        chosen: Ints = np.clip(limit - before, 0, counts)
        return chosen


@lru_cache(maxsize=2)
def _tables(step_ns: tuple[int, ...], alone_ns: tuple[int, ...]) -> tuple[Ints, Ints, Doubles]:
    """Return the costs of steps of 0, 1, ... tokens, the same without a step to overlap, and the least per draft.

    The last one, [LARGEST_STEP + 1], is per draft, in a step with the given number of other tokens.
    """
    count = LARGEST_STEP + MAX_STEP_DRAFTS + 1
    costs = _by_tokens(step_ns, count)
    alone = np.maximum(costs, _by_tokens(alone_ns, count)) if alone_ns else costs
    ahead = np.arange(1, MAX_STEP_DRAFTS + 1)
    size = np.arange(LARGEST_STEP + 1)[:, None]
    least: Doubles = ((costs[size + ahead] - costs[size]) / ahead).min(1)
    return costs, alone, least


def _least_chances(costs: Ints, alone: Ints, overhead_ns: int) -> Doubles:
    """Return [LARGEST_STEP + 1] the least chance at which drafts may pay if rows lose turns by them.

    costs, alone: see _tables(). It is a bound: it assumes rows with unlimited drafts of this chance, which keep chance
    / (1 - chance) tokens each at the cost of one.
    """
    size, drafted = np.arange(1, LARGEST_STEP + 1)[:, None], np.arange(1, MAX_STEP_DRAFTS + 1)
    left = np.maximum(size - drafted, 0)
    both = np.where(left > 0, costs[size + drafted] + costs[left], alone[size + drafted])
    gains = (size * ((both + overhead_ns) / costs[size]) - size - left) / drafted
    least = np.maximum(np.where(drafted <= size, gains, np.inf).min(1), 0.0)
    return np.append(0.0, _SLACK * least / (1 + least))


def _by_tokens(step_ns: tuple[int, ...], count: int) -> Ints:
    """Return the durations in ns of steps of 0, 1, ... count - 1 tokens. They never decrease.

    Other work on the machine makes a measured step longer, never shorter. So no size takes longer than a larger one
    that was measured; otherwise a disturbed step of one token would make its drafts look cheap. Values between the
    measured sizes are interpolated linearly, and values above the last one are extrapolated from the last two.
    """
    step_ns = tuple(accumulate(reversed(step_ns), min))[::-1]
    costs, size, rise = [0, step_ns[0]], 1, 0
    for high in step_ns[1:]:
        low = costs[-1]
        rise = high - low
        costs += [low + rise * part // size for part in range(1, size + 1)]
        size *= 2
    costs += [costs[size] + rise * part // max(1, size // 2) for part in range(1, count - size)]
    return np.array(costs[:count], np.int64)
