"""The scheduler with pins decides as the gold model with pins, on random traces with time."""

import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
import pytest

from ipc.wire.messages import AddRequest
from ipc.wire.pin_messages import ForkPin, Pin
from tests.core.scheduling.gold_entry import Entry
from tests.core.scheduling.gold_machine import MS, PLAIN, GoldMachine, Options, new_seeds, run, run_share
from tests.core.scheduling.gold_pins import GoldWithPins


class PinsMachine(GoldMachine):
    gold_class = GoldWithPins
    gold: GoldWithPins
    options: ClassVar[Options] = {
        **PLAIN,
        "num_blocks": [12, 20, 40, 60],
        "prefix_caching": [True, True, True, False],
        "max_pinned_share": [0.5, 0.9, 0.0],
        "max_tenant_pinned_share": [0.25, 0.5, 0.9],
    }
    num_pinned = num_yielded = num_refused = 0  # of all examples

    def begin(self, options: dict[str, Any]) -> None:
        super().begin(options)
        self.gold.pins, self.gold.live = {}, []
        self.more_rules: Sequence[Callable[[], None]] = (self.call,)

    def with_more(self, rng: random.Random, message: AddRequest) -> AddRequest:
        length = len(message.prompt_token_ids) // 4
        pins = [
            Pin(
                rng.choice(["", "", "a", "b"]),
                rng.choice([1, 4, 10, 50]),
                rng.choice([0, 0, rng.randrange(length + 1)]),
            )
            for _ in range(rng.choice([0, 0, 1, 1, 2]))
        ]
        return msgspec.structs.replace(message, pins=tuple(pins))

    def added(self, message: AddRequest, entry: Entry) -> None:
        wanted = [self.gold.pin(pin, message.tenant, entry, self.now) for pin in message.pins]
        answers = self.hand.inbox.pinned.get((entry.client, message.number), [])
        assert [(one.num_tokens, one.num_promised, one.refusal != "") for one in answers] == wanted
        type(self).num_pinned += sum(not refused for *_, refused in wanted)
        type(self).num_refused += sum(refused for *_, refused in wanted)

    def call(self) -> None:
        """Release a pin, or fork it."""
        rng, pins = self.rng, self.scheduler.pins
        tenant, name = rng.choice(["", "salt", "b"]), rng.choice("ab")
        if rng.randrange(3):
            new_name, ttl_ms = rng.choice("abc"), rng.choice([5, 20])
            failed = pins.fork(ForkPin(1, name, new_name, ttl_ms, tenant), self.now)
            wanted = self.gold.fork(tenant, name, new_name, ttl_ms, self.now)
            assert (None if failed is None else failed[0].name) == {
                True: None,
                False: "INVALID_ARGUMENT",
                None: "PIN_REFUSED",
            }[wanted]
        else:
            assert (pins.release(tenant, name, self.now) == "") == self.gold.release_pin(tenant, name, self.now)

    def step(self) -> None:
        super().step()
        held = {
            (pin.tenant, pin.name, len(pin.blocks), len(pin.token_ids), pin.num_kept) for pin in self.scheduler.pins
        }
        assert held == {
            (pin.tenant, pin.name, len(pin.blocks), len(pin.tokens), pin.kept) for pin in self.gold.pins.values()
        }

    def end(self) -> None:
        self.resume()
        self.step()
        bound = 50 + 50 * sum(entry.max_total for entry in self.live.values())
        for number in range(bound):  # all requests end next to the pins, or the pins yield
            if not self.live and not self.flight:
                break
            self.lose_patience(number)
            self.step()
        type(self).num_yielded += self.scheduler.stats.num_pins_yielded
        self.now += 1000 * MS
        self.step()
        assert len(self.scheduler.pins) == len(self.scheduler.pins.ledger) == 0
        super().end()


@pytest.mark.timeout(200)
def test_decisions_with_pins_equal_the_gold_models() -> None:
    run_share(PinsMachine, 40)
    assert PinsMachine.num_pinned > 40
    assert PinsMachine.num_refused > 20
    assert PinsMachine.num_yielded > 0


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak_decisions_with_pins_equal_the_gold_models() -> None:
    run(PinsMachine, new_seeds(1 / 6, 100_000))
