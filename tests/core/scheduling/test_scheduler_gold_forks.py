"""The scheduler with several choices of a message against the gold model with forks: equal decisions each step."""

import os
import random
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from ipc.messages import AddRequest
from tests.core.scheduling.gold_entry import Entry
from tests.core.scheduling.gold_forks import GoldWithForks
from tests.core.scheduling.test_scheduler_gold import ALL, GoldMachine, config_of, run


class ForksMachine(GoldMachine):
    gold_class = GoldWithForks
    num_forked = 0

    @initialize(options=st.fixed_dictionaries(ALL | {"prefix_caching": st.booleans()}))
    def start(self, options: dict[str, Any]) -> None:
        self.begin(config_of(options))

    def with_choices(self, rng: random.Random, message: AddRequest) -> AddRequest:
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
    run(ForksMachine, 40, True)
    assert ForksMachine.num_forked > 100


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak_decisions_with_forks_equal_the_gold_models() -> None:
    """SCHEDULER_EXAMPLES=n runs that many; 20,000 otherwise."""
    run(ForksMachine, int(os.environ.get("SCHEDULER_EXAMPLES", "20000")), False)
