"""The scheduler with drafts against the gold model with drafts: equal decisions after every step."""

from typing import Any

import numpy as np
import pytest

from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.proposers.proposer import Proposals
from core.scheduling.scheduler import Scheduler
from ipc.options.config import EngineConfig
from ipc.tables.arrays import Ints, Rows
from tests.core.driving import ByHand
from tests.core.hostile_drafts import speculative
from tests.core.scheduling.gold_drafts import GoldWithDrafts
from tests.core.scheduling.gold_machine import ALL, GoldMachine, Options, new_seeds, run, run_share, sampled

OPTIONS: Options = {**ALL, "num_drafts": [1, 2, 4, 9], "budget": [40, 40, 12, 9, 5]}


def guesses(number: int, position: int) -> tuple[list[int], int]:
    """Up to 11 tokens from a position on, most of them right, and their kind."""
    value = (number * 31 + position * 17) % 23
    drafts = [sampled(number, position + place) for place in range(value % 12)]
    if value % 3 == 0 and drafts:
        drafts[value % len(drafts)] = 1
    return drafts, value % 5


class Guessing:
    """A Proposer of these guesses."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._table = scheduler.table

    def end(self, rows: Rows) -> None:
        pass

    def propose(self, rows: Ints, most: int) -> Proposals:
        found = [guesses(int(self._table.number[row]), int(self._table.num_tokens[row])) for row in rows.tolist()]
        token_ids = np.zeros((len(rows), most), np.int32)
        for index, (drafts, _) in enumerate(found):
            token_ids[index, : len(drafts)] = drafts[:most]
        counts = np.array([len(drafts) for drafts, _ in found])
        return Proposals(counts, token_ids, np.array([kind for _, kind in found]))


class Verifying(ByHand):
    """Rows with drafts yield what sampled() gives, up to the first draft that is not that."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.scheduler.speculation.proposers[:] = [Guessing(self.scheduler)]
        self._tenancies: dict[int, Ints] = {}
        self.num_right = 0

    def schedule(self, now_ns: int = 0) -> SchedulerOutput:
        plan = self.scheduler.schedule(now_ns)
        self.scheduler.check_integrity()
        if not plan.is_empty:
            self.mirror.apply(plan)
            samples = self._samples[plan.step] = self.mirror.advance(plan)
            self._tenancies[plan.step] = self.scheduler.table.tenancy[plan.rows]
            drafted = plan.num_draft_tokens > 0 if len(plan.num_draft_tokens) else np.zeros(len(plan.rows), np.bool_)
            assert samples[drafted].all()
            rows = plan.rows[samples & ~drafted]  # those with drafts are told when their step is back
            self.mirror.num_tokens[rows] += 1
        return plan

    def update(self, plan: SchedulerOutput, token: Any = 7) -> Any:
        tenancies = self._tenancies.pop(plan.step)
        if not len(plan.num_draft_tokens):
            return super().update(plan, token)
        table, samples, runs = self.scheduler.table, self._samples.pop(plan.step), []
        live, first = table.tenancy[plan.rows] == tenancies, 0
        for index, row in enumerate(plan.rows.tolist()):
            count = int(plan.num_draft_tokens[index])
            drafts = plan.draft_token_ids[first : first + count].tolist()
            first += count
            number, length = int(table.number[row]), int(table.num_tokens[row])
            right = 0
            while right < count and drafts[right] == sampled(number, length + right):
                right += 1
            runs.append([sampled(number, length + place) for place in range(right + 1)] if samples[index] else [])
            self.num_right += right
            if count and live[index]:
                self.mirror.num_tokens[row] += right + 1
                self.mirror.num_computed_tokens[row] += right
        tokens = np.array([token for one in runs for token in one], np.int32)
        output = ModelRunnerOutput(plan.step, tokens, counts=np.array([len(one) for one in runs], np.int32))
        replies = self.scheduler.update_from_output(plan, output)
        self.inbox.take(replies)
        self.scheduler.check_integrity()
        return replies


class DraftsMachine(GoldMachine):
    gold_class = GoldWithDrafts
    options = OPTIONS
    num_right = 0

    def begin(self, options: dict[str, Any]) -> None:
        num_drafts = options.pop("num_drafts")
        super().begin(options | {"speculative_config": speculative(num_drafts)})
        assert isinstance(self.gold, GoldWithDrafts)
        self.gold.guesses = guesses  # type: ignore[method-assign, assignment]

    def hand_of(self, config: EngineConfig) -> ByHand:
        return Verifying(config)

    def end(self) -> None:
        super().end()
        assert isinstance(self.hand, Verifying)
        DraftsMachine.num_right += self.hand.num_right


@pytest.mark.timeout(400)
def test_decisions_with_drafts_equal_the_gold_models() -> None:
    run_share(DraftsMachine, 60)
    assert DraftsMachine.num_right > 100


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak_decisions_with_drafts_equal_the_gold_models() -> None:
    """SCHEDULER_EXAMPLES=n runs that many; 20,000 otherwise."""
    run(DraftsMachine, new_seeds(1, 20_000))
