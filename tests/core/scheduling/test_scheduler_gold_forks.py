"""The scheduler with several choices of a message against the gold model with forks: equal decisions each step."""

import random

import msgspec
import pytest

from ipc.wire.messages import AddRequest
from tests.core.scheduling.gold_entry import Entry
from tests.core.scheduling.gold_forks import GoldWithForks
from tests.core.scheduling.gold_machine import ALL, GoldMachine, Options, new_seeds, run, run_share

OPTIONS: Options = {**ALL, "prefix_caching": [True, False]}


class ForksMachine(GoldMachine):
    gold_class = GoldWithForks
    options = OPTIONS
    num_forked = 0

    def with_more(self, rng: random.Random, message: AddRequest) -> AddRequest:
        params = msgspec.structs.replace(message.params, n=rng.choice([1, 2, 2, 3, 5]), temperature=1.0)
        return msgspec.structs.replace(message, params=params)

    def add_to_gold(self, entries: list[Entry]) -> bool:
        assert isinstance(self.gold, GoldWithForks)
        return self.gold.add_choices(entries)

    def step(self) -> None:
        super().step()
        ForksMachine.num_forked += sum(q.computed - q.n > 0 for q in self.gold.starts if q.choices)


@pytest.mark.timeout(400)
def test_decisions_with_forks_equal_the_gold_models() -> None:
    run_share(ForksMachine, 40)
    assert ForksMachine.num_forked > 100


def test_rows_at_one_virtual_time_do_not_take_turns_without_a_token() -> None:
    """A soak's find: two rows gave way to a request whose blocks were fenced, and took them again in the next step."""
    before = ForksMachine.num_steps
    run(ForksMachine, [3_002_301])
    assert ForksMachine.num_steps - before < 1_000  # it had not ended after 27,850


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak_decisions_with_forks_equal_the_gold_models() -> None:
    """SCHEDULER_EXAMPLES=n runs that many; 20,000 otherwise."""
    run(ForksMachine, new_seeds(1, 20_000))
