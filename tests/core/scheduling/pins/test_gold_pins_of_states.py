"""Pins of a model with recurrent layers: decisions, promises, and the states of each plan, as the gold model's."""

from typing import Any

import pytest

from core.batch.kept_states import KeptStates
from core.execution.state_slots import num_swap_states
from tests.core.scheduling.gold_machine import new_seeds, run, run_share
from tests.core.scheduling.gold_pins import GoldWithStatePins
from tests.core.scheduling.test_scheduler_gold import StatesMachine, of_short_prompts
from tests.core.scheduling.test_scheduler_gold_pins import PinsMachine

__all__ = ["of_short_prompts"]


class StatePinsMachine(PinsMachine, StatesMachine):
    gold: GoldWithStatePins
    options = PinsMachine.options | {"num_slots": [2, 5, 9, 40], "num_swapped": [0], "kv_window": [0]}
    num_states = 0

    def begin(self, options: dict[str, Any]) -> None:
        super().begin(options)
        self.gold = GoldWithStatePins(self.config, self.num_slots, num_swap_states(self.config, 1))
        self.gold.pins, self.gold.live = {}, []

    def step(self) -> None:
        super().step()
        held = {(pin.tenant, pin.name, *sorted(pin.states)) for pin in self.scheduler.pins}
        assert held == {(pin.tenant, pin.name, *sorted(pin.states)) for pin in self.gold.pins.values()}
        type(self).num_states += len(self.gold.b.pinned)


def test_decisions_equal_the_gold_models() -> None:
    run_share(StatePinsMachine, 12)
    assert StatePinsMachine.num_states > 99


def test_a_state_that_pins_do_not_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptStates, "pin", lambda *_: True)
    monkeypatch.setattr(KeptStates, "unpin", lambda *_: None)
    with pytest.raises((AssertionError, KeyError)):
        run(StatePinsMachine, range(12))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak_decisions_equal_the_gold_models() -> None:
    run(StatePinsMachine, new_seeds(1 / 12, 100_000))
