"""Pins of models with recurrent layers, or with windows whose layers have blocks of their own."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis.stateful import invariant

from core.batch import kept_states
from core.batch.request import request_from_message
from core.scheduling import scheduler
from ipc.options.resolved import ResolvedConfig
from ipc.wire.messages import AddRequest, ResetPrefixCache
from ipc.wire.pin_messages import ForkPin, GetPins, Pin
from tests.core.driving import add_message, small_config
from tests.core.scheduling.exchange_driver import ExchangeDriver, exchange_config
from tests.core.scheduling.pins.test_pins import PinDriver, pinned_message, prompt_of, strangers
from tests.core.scheduling.test_scheduler_states import EngineMachine, RecurrentMachine, run
from tests.core.scheduling.test_window_page_states import PageMachine
from tests.core.stateful_executor import StatefulExecutor

SECOND = 10**9


@pytest.fixture(autouse=True)
def of_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kept_states, scheduler):
        monkeypatch.setattr(module, "LEAST_TOKENS", 4)
    monkeypatch.setattr(kept_states, "_LEAST_DISTANCE", 8)


def of_states(num_slots: int, config: ResolvedConfig) -> ResolvedConfig:
    return msgspec.structs.replace(config, kv_cache_memory_bytes=2 * (config.max_num_seqs + num_slots))


def windows(num_blocks: int = 100, **options: Any) -> ResolvedConfig:
    shape: dict[str, Any] = {"kv_window": 9, "kv_page_blocks": 3, "max_model_len": 200, "budget": 40}
    return small_config(num_blocks, **{**shape, **options})


DRIVERS = {
    "states": lambda: PinDriver(of_states(16, small_config(100)), executor=StatefulExecutor),
    "windows": lambda: PinDriver(windows()),
}


@pytest.mark.parametrize("kind", DRIVERS)
def test_a_pinned_prompt_is_found_until_its_time_and_not_longer(kind: str) -> None:
    driver = DRIVERS[kind]()
    session = prompt_of(7, 80)
    driver.go(pinned_message(1, session, Pin("s", 10_000)))
    assert [(one.num_tokens, one.refusal) for one in driver.inbox.pinned[0, 1]] == [(76, "")]  # but its last token
    strangers(driver, 100, 30)
    (again,) = driver.go(pinned_message(2, session, Pin("s", 10_000)), now_ns=1 * SECOND)
    assert (again.cached, driver.inbox.pinned[0, 2][0].num_promised) == (76, 76)
    strangers(driver, 200, 30, 1 * SECOND)
    (turn,) = driver.go(pinned_message(3, [*session, *range(5, 25)], Pin("s", 10_000)), now_ns=9 * SECOND)
    assert (turn.cached, driver.inbox.pinned[0, 3][0].num_promised) == (76, 76)
    strangers(driver, 300, 30, 9 * SECOND)
    (longer,) = driver.go(pinned_message(4, [*session, *range(5, 25), 4, 3, 5], Pin("s", 1)), now_ns=18 * SECOND)
    assert (longer.cached, driver.inbox.pinned[0, 4][0].num_promised) == (96, 96)
    strangers(driver, 400, 30, 20 * SECOND)
    (late,) = driver.go(pinned_message(5, [*session, 9], Pin("s", 1)), now_ns=20 * SECOND)
    assert (late.cached, driver.inbox.pinned[0, 5][0].num_promised) == (0, 0)


@pytest.mark.parametrize("kind", DRIVERS)
def test_the_first_tokens_of_a_prompt_are_pinned_with_what_follows_from_them(kind: str) -> None:
    driver = DRIVERS[kind]()
    driver.go(pinned_message(1, prompt_of(7, 80), Pin("", 10_000, 42)))
    assert driver.inbox.pinned[0, 1][0].num_tokens == 40
    strangers(driver, 100, 30)
    (again,) = driver.go(pinned_message(2, [*prompt_of(7, 40), *prompt_of(9, 30)], Pin("", 10_000, 40)))
    assert (again.cached, driver.inbox.pinned[0, 2][0].num_promised) == (40, 40)


@pytest.mark.parametrize("kind", DRIVERS)
def test_a_fork_and_what_is_forgotten(kind: str) -> None:
    driver = DRIVERS[kind]()
    driver.go(pinned_message(1, prompt_of(7, 80), Pin("trunk", 10_000)))
    held = driver.engine.statistics(1).num_pinned_blocks
    driver.call(ForkPin(1, "trunk", "branch", 10_000))
    assert driver.engine.statistics(1).num_pinned_blocks == held
    (trunk, branch) = driver.call(GetPins(2)).pins
    assert (trunk.num_held_tokens, branch.num_held_tokens) == (76, 76)
    driver.step([(0, ResetPrefixCache(3))])
    assert driver.scheduler.pool.num_free == 99
    assert [one.num_held_tokens for one in driver.call(GetPins(4)).pins] == [0, 0]
    (again,) = driver.go(pinned_message(2, [*prompt_of(7, 80), 1], Pin("branch", 10_000)))
    assert (again.cached, driver.inbox.pinned[0, 2][0].num_promised) == (0, 76)


def test_one_state_before_the_last_is_held_for_templates_that_change_the_end() -> None:
    driver = DRIVERS["states"]()
    driver.go(pinned_message(1, prompt_of(7, 81), Pin("s", 10_000)))
    strangers(driver, 100, 30)
    (again,) = driver.go(pinned_message(2, [*prompt_of(7, 78), 800, 801, 802], Pin("s", 10_000)))
    assert (again.cached, driver.inbox.pinned[0, 2][0].num_promised) == (76, 76)


def test_an_aborted_request_leaves_what_it_has_computed() -> None:
    for driver in (
        PinDriver(of_states(16, small_config(100, budget=16)), executor=StatefulExecutor),
        PinDriver(windows(budget=16)),
    ):
        driver.step([(0, pinned_message(1, prompt_of(7, 80), Pin("s", 10_000)))])
        driver.step()
        driver.scheduler.finish_requests(0, [1])
        strangers(driver, 100, 30)
        (again,) = driver.go(pinned_message(2, prompt_of(7, 80), Pin("s", 10_000)))
        assert (again.cached, driver.inbox.pinned[0, 2][0].num_promised) == (32, 32)


def test_states_have_bounds_of_their_own() -> None:
    driver = PinDriver(of_states(16, small_config(101)), executor=StatefulExecutor)
    for number in range(3):
        driver.go(pinned_message(number, prompt_of(number, 20), Pin(f"s{number}", 10_000), tenant="a"))
    assert [driver.inbox.pinned[0, number][0].refusal for number in range(3)] == [
        "",
        "",
        "this tenant has pinned 4 recurrent states, the pin adds 2, and its share is 4 (max_tenant_pinned_share)",
    ]
    driver.go(pinned_message(4, prompt_of(4, 5), Pin("short", 10_000), tenant="b"))
    assert driver.inbox.pinned[0, 4][0].num_tokens == 4
    kept_states.LEAST_TOKENS = 64
    driver.go(pinned_message(5, prompt_of(5, 60), Pin("short", 10_000), tenant="b"))
    assert driver.inbox.pinned[0, 5][0].refusal == "it is shorter than 64 tokens, before which no state is kept"


def test_windows_count_as_their_memory_and_pages_are_bounded() -> None:
    """99 pages, of which a tenant may pin 24. A page has 3 blocks, or one of a window; a window has 3 at most."""
    driver = PinDriver(windows(max_tenant_pinned_share=0.25))
    driver.go(pinned_message(1, prompt_of(1, 101), Pin("a", 10_000)))
    pins = driver.call(GetPins(1))
    assert (pins.num_pinned_tokens, pins.max_pinned_tokens) == (4 * (25 + 2 * 3), 4 * 3 * 24)
    assert driver.engine.statistics(1).num_pinned_blocks == 9 + 2
    for number in range(2, 9):  # each begins with more of the same tokens: each takes one block of a page of its own
        prompt = [*prompt_of(50, 4 * number), *prompt_of(60 + number, 5)]
        driver.go(pinned_message(number, prompt, Pin(f"{number}", 10_000)))
        assert driver.engine.statistics(1).num_pinned_blocks <= 24
    assert driver.inbox.pinned[0, 3][0].refusal == ""


def test_pins_are_kept_in_a_folder_with_what_belongs_to_them(tmp_path: Path) -> None:
    size = 4 * 8 + 64
    for name, config, executor in (
        ("states", of_states(24, exchange_config(60, 40, max_tenant_pinned_share=0.5)), {"executor": StatefulExecutor}),
        (
            "windows",
            exchange_config(
                90, 40, max_tenant_pinned_share=0.5, kv_window=9, kv_page_blocks=3, max_model_len=100, budget=40
            ),
            {},
        ),
    ):
        first = ExchangeDriver(tmp_path / name, config, max_bytes=60 * size, **executor)  # type: ignore[arg-type]
        session = prompt_of(7, 41)
        first.run(pinned_message(1, session, Pin("s", 3_600_000)))
        for number in range(100, 125):
            first.run(pinned_message(number, prompt_of(number, 24)))
        first.folder.make_room()
        first.close()
        second = ExchangeDriver(tmp_path / name, config, max_bytes=60 * size, **executor)  # type: ignore[arg-type]
        assert second.run(pinned_message(3, [*session, 5], Pin("s", 3_600_000))).cached == 40, name
        second.close()


class PinsOfMachine(EngineMachine):
    """Random clients, of whom some pin; what a pin holds is looked up after each step."""

    num_usable = 0

    def with_more(self, rng: random.Random, message: AddRequest) -> AddRequest:
        length = len(message.prompt_token_ids) // 4
        some = [
            Pin(rng.choice(["", "a", "b"]), rng.choice([1, 4, 20]), rng.choice([0, rng.randrange(length + 1)]))
            for _ in range(rng.choice([0, 1, 1, 2]))
        ]
        return msgspec.structs.replace(message, pins=tuple(some))

    def config_of(self, config: dict[str, Any]) -> ResolvedConfig:
        return super().config_of({**config, "max_pinned_share": 0.9, "max_tenant_pinned_share": 0.9})

    @invariant()
    def check_pins(self) -> None:
        if not hasattr(self, "driver"):
            return
        batch, found = self.driver.scheduler.batch, self.driver.scheduler.pins
        for pinned in found:
            usable = found._num_usable(pinned)
            if not usable:
                continue
            message = add_message(0, [*pinned.token_ids[: usable * batch.block_size].tolist(), 1], 1)
            probe = request_from_message(message, 0, 0, self.max_model_len)
            probe.root = pinned.root
            batch.prefix_cache.prepare(probe)
            blocks, _ = batch.prefix_cache.find_all(probe)
            assert blocks.tolist() == pinned.blocks[:usable].tolist()
            assert (batch.pool.ref_count[blocks // batch.pool.page_blocks] > 0).all()
            PinsOfMachine.num_usable += 1
            if batch.kept_states is not None:
                assert batch.kept_states.last_ends(batch.pool.names.content[blocks], 1) == [usable]
            for beside, other in zip(batch.pool.names.beside, batch.others, strict=True):
                window = beside.found[blocks][other.kind.num_passed(usable * batch.block_size) :]
                assert (window != 0).all()
                assert (batch.pool.ref_count[window // batch.pool.page_blocks] > 0).all()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.step(1, 0)
        self.now += 10**12
        super().teardown()
        if self.driver.scheduler.batch.kept_states is not None:
            assert not self.driver.scheduler.batch.kept_states._pins


class PinsOfStates(PinsOfMachine, RecurrentMachine):
    pass


class PinsOfWindows(PinsOfMachine, PageMachine):
    pass


@pytest.mark.parametrize("machine", [PinsOfStates, PinsOfWindows])
@pytest.mark.parametrize("examples", [8, pytest.param(1_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_engine_survives_random_clients_that_pin(machine: type[PinsOfMachine], examples: int) -> None:
    before = PinsOfMachine.num_usable
    run(machine, examples)
    assert PinsOfMachine.num_usable > before + 4


def test_what_a_failed_request_has_computed_is_given_up() -> None:
    """Its logits are not finite, so its blocks lose their names, also those that it found."""
    for driver in (
        PinDriver(of_states(16, small_config(100, budget=16)), 999, StatefulExecutor),
        PinDriver(windows(budget=16), 999),
    ):
        session = prompt_of(7, 41)
        driver.go(pinned_message(1, session, Pin("s", 10_000)))
        (failed,) = driver.go(pinned_message(2, [*session, *range(5, 24), 999, *range(30, 50)], Pin("s", 10_000)))
        assert failed.failed is not None
        driver.scheduler.check_integrity()
        (pinned,) = driver.scheduler.pins
        assert (len(pinned.blocks), pinned.ends, len(driver.scheduler.pins.blocks)) == (0, [], 0)
        longer = [*session, *range(5, 24), 3]
        (again,) = driver.go(pinned_message(3, longer, Pin("s", 10_000)))
        assert again.cached == 0
        assert driver.call(GetPins(1)).pins[0].num_held_tokens == 60
        strangers(driver, 100, 30)
        (last,) = driver.go(pinned_message(4, [*longer, 3, 4], Pin("s", 10_000)))
        assert last.cached == driver.inbox.pinned[0, 4][0].num_promised == 60
