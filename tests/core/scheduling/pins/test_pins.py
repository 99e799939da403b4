"""Pins: what they promise is found until their time, whatever else runs; tenants have bounds; what is lost is told."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from core.kv.orders import Retain
from ipc.wire.messages import Abort, AddRequest, CallDone, CallFailed, ErrorCode, ResetPrefixCache
from ipc.wire.pin_messages import ForkPin, GetPins, Pin, PinList, ReleasePin
from tests.columns import pack_numbers
from tests.core.driving import Driver, Received, add_message, expected_tokens, small_config
from tests.core.scheduling.exchange_driver import ExchangeDriver, exchange_config

SECOND = 10**9


def pinned_message(
    number: int, prompt: Sequence[int], *pins: Pin, tenant: str = "", max_tokens: int = 2, **options: Any
) -> AddRequest:
    message = add_message(number, prompt, max_tokens, **options)
    return msgspec.structs.replace(message, pins=pins, tenant=tenant)


def prompt_of(number: int, length: int) -> list[int]:
    return [number % 900 + 3, *(3 + (number * 31 + place) % 900 for place in range(length - 1))]


class PinDriver(Driver):
    def go(self, *messages: AddRequest, now_ns: int = 0) -> list[Received]:
        self.step([(0, message) for message in messages], now_ns)
        while self.engine.has_work:
            self.step(now_ns=now_ns)
        for message in messages:
            received = self.inbox.received[0, message.number]
            if received.failed is None:
                assert received.tokens == expected_tokens(message, self.config.max_model_len or 0)
        return [self.inbox.received[0, message.number] for message in messages]

    def call(self, message: Any, now_ns: int = 0) -> Any:
        return next(reply for _, reply in self.step([(0, message)], now_ns) if isinstance(reply, CallAnswer))


CallAnswer = PinList | CallDone | CallFailed


def strangers(driver: PinDriver, first: int, count: int, now_ns: int = 0) -> None:
    """Requests that fill the cache several times."""
    for number in range(first, first + count):
        driver.go(pinned_message(number, prompt_of(number, 60)), now_ns=now_ns)


def test_a_pinned_prompt_is_found_until_its_time_and_not_longer() -> None:
    driver = PinDriver(small_config(100, max_tenant_pinned_share=0.25))
    session = prompt_of(7, 80)
    driver.go(pinned_message(1, session, Pin("s", 10_000)))
    assert [(one.num_tokens, one.num_promised) for one in driver.inbox.pinned[0, 1]] == [(80, 0)]
    strangers(driver, 100, 30)
    (again,) = driver.go(pinned_message(2, [*session, 5, 6, 7], Pin("s", 10_000)), now_ns=9 * SECOND)
    assert again.cached == 80
    assert driver.inbox.pinned[0, 2][0].num_promised == 80
    strangers(driver, 200, 30, 9 * SECOND)
    (renewed,) = driver.go(pinned_message(3, [*session, 8]), now_ns=18 * SECOND)  # it counts from the last request
    assert renewed.cached == 80
    strangers(driver, 300, 30, 20 * SECOND)
    (late,) = driver.go(pinned_message(4, [*session, 9], Pin("s", 1)), now_ns=20 * SECOND)
    assert late.cached == 0
    assert driver.inbox.pinned[0, 4][0].num_promised == 0


def test_only_the_first_tokens_are_pinned_if_the_request_says_so() -> None:
    driver = PinDriver(small_config(100))
    driver.go(pinned_message(1, prompt_of(7, 80), Pin("", 10_000, 42)))
    assert driver.inbox.pinned[0, 1][0].num_tokens == 40  # whole blocks
    strangers(driver, 100, 30)
    (again,) = driver.go(pinned_message(2, prompt_of(7, 80), Pin("", 10_000, 60)))
    assert (again.cached, driver.inbox.pinned[0, 2][0].num_promised) == (40, 40)


def test_a_pin_holds_what_a_request_of_one_token_has_computed() -> None:
    """Its blocks are free before the next step is planned, and the next step needs them all."""
    driver = PinDriver(small_config(41, max_model_len=160, max_tenant_pinned_share=0.5))
    driver.step([(0, pinned_message(1, prompt_of(7, 40), Pin("s", 10_000), max_tokens=1))])
    driver.go(pinned_message(2, prompt_of(8, 110)))
    (again,) = driver.go(pinned_message(3, [*prompt_of(7, 40), 5]))
    assert again.cached == 40


def test_a_tenant_has_its_share_and_a_refusal_names_it() -> None:
    driver = PinDriver(small_config(101, max_pinned_share=0.5, max_tenant_pinned_share=0.3))
    for number, tenant in enumerate(("a", "a", "b", "c")):
        driver.go(pinned_message(number, prompt_of(number, 80), Pin(f"s{number}", 10_000), tenant=tenant))
    answers = [driver.inbox.pinned[0, number][0] for number in range(4)]
    assert [one.num_tokens for one in answers] == [80, 0, 80, 0]
    assert answers[1].refusal == (
        "this tenant has pinned 80 tokens, the pin adds 80, and its share is 120 (max_tenant_pinned_share)"
    )
    assert answers[3].refusal == "160 tokens are pinned, the pin adds 80, and at most 200 may be (max_pinned_share)"
    must = Pin("must", 10_000, is_required=True)
    (refused,) = driver.go(pinned_message(9, prompt_of(9, 80), must, tenant="a"))
    assert refused.failed is not None
    assert refused.failed.code == ErrorCode.PIN_REFUSED
    assert "its share is 120" in refused.failed.message
    assert not driver.scheduler.live_requests()
    driver.go(pinned_message(10, prompt_of(0, 80) + prompt_of(3, 40), Pin("s0", 10_000), tenant="a"))
    assert driver.inbox.pinned[0, 10][0].num_tokens == 120  # the blocks in common are charged once
    pins = driver.call(GetPins(1, "a"))
    assert (pins.num_pinned_tokens, pins.max_pinned_tokens) == (120, 120)
    assert [(one.name, one.num_tokens, one.num_held_tokens) for one in pins.pins] == [("s0", 120, 120)]
    statistics = driver.engine.statistics(1)
    assert (statistics.num_pins, statistics.num_pinned_blocks, statistics.max_pinned_blocks) == (2, 50, 50)
    assert statistics.num_pins_refused == 3


def test_names_without_end_are_refused() -> None:
    driver = PinDriver(small_config(101, max_tenant_pinned_share=0.1))
    refusals = []
    for number in range(60):
        driver.go(pinned_message(number, prompt_of(1, 16), Pin(f"{number}", 10_000)))
        refusals.append(driver.inbox.pinned[0, number][0].refusal)
    assert refusals[:40] == [""] * 40  # 16 times the share of 10 blocks
    assert "16 times its share" in refusals[40]


def test_pins_give_way_to_a_request_that_could_not_run_otherwise_and_the_next_answer_tells() -> None:
    driver = PinDriver(small_config(41, max_model_len=160, max_pinned_share=0.9, max_tenant_pinned_share=0.9))
    driver.go(pinned_message(1, prompt_of(7, 40), Pin("first", 20_000)))
    driver.go(pinned_message(2, prompt_of(8, 40), Pin("other", 10_000)))
    driver.go(pinned_message(3, prompt_of(9, 110), max_tokens=5))  # it needs 29 of 40 blocks
    assert driver.scheduler.stats.num_pins_yielded == 1
    strangers(driver, 100, 5)
    (kept,) = driver.go(pinned_message(4, [*prompt_of(7, 40), 5], Pin("first", 20_000)))
    (lost,) = driver.go(pinned_message(5, [*prompt_of(8, 40), 5], Pin("other", 10_000)))
    assert (kept.cached, driver.inbox.pinned[0, 4][0].num_promised) == (40, 40)
    assert (lost.cached, driver.inbox.pinned[0, 5][0].num_promised) == (0, 40)


def test_a_running_request_that_grows_gets_the_blocks_of_pins() -> None:
    driver = PinDriver(small_config(41, max_model_len=160, max_pinned_share=0.9, max_tenant_pinned_share=0.9))
    driver.go(pinned_message(1, prompt_of(7, 100), Pin("s", 20_000)))
    driver.go(pinned_message(2, prompt_of(9, 20), max_tokens=120))
    assert driver.scheduler.stats.num_pins_yielded == 1


def test_what_is_forgotten_is_promised_and_not_found() -> None:
    driver = PinDriver(small_config(100))
    driver.go(pinned_message(1, prompt_of(7, 80), Pin("s", 10_000)))
    driver.step([(0, ResetPrefixCache(1))])
    assert driver.scheduler.pool.num_free == 99
    (again,) = driver.go(pinned_message(2, [*prompt_of(7, 80), 1], Pin("s", 10_000)))
    assert (again.cached, driver.inbox.pinned[0, 2][0].num_promised) == (0, 80)
    (third,) = driver.go(pinned_message(3, [*prompt_of(7, 80), 2], Pin("s", 10_000)))
    assert third.cached == 80


def test_a_fork_goes_on_alone_and_a_release_frees() -> None:
    driver = PinDriver(small_config(101))
    driver.go(pinned_message(1, prompt_of(7, 80), Pin("trunk", 10_000)))
    assert driver.call(ForkPin(1, "trunk", "branch", 10_000)) == CallDone(1)
    assert driver.call(ReleasePin(2, "trunk")) == CallDone(2)
    strangers(driver, 100, 30)
    (branch,) = driver.go(pinned_message(2, [*prompt_of(7, 80), 1], Pin("branch", 10_000)))
    assert (branch.cached, driver.inbox.pinned[0, 2][0].num_promised) == (80, 80)
    for call in (ReleasePin(3, "trunk"), ForkPin(3, "trunk", "x", 10), ReleasePin(3, "branch", "other tenant")):
        answer = driver.call(call)
        assert (answer.code, "there is no pin" in answer.message) == (ErrorCode.INVALID_ARGUMENT, True)
    driver.call(ReleasePin(4, "branch"))
    assert driver.scheduler.pool.num_free == 100


def test_pins_are_no_rows_that_have_blocks_in_common() -> None:
    """Otherwise a kernel would read one row's blocks for another one."""
    driver = PinDriver(small_config(100))
    driver.go(pinned_message(1, prompt_of(7, 40), Pin("s", 10_000)))
    driver.step([(0, pinned_message(2, [*prompt_of(7, 40), 1], max_tokens=9))])
    driver.step([(0, pinned_message(3, prompt_of(8, 40), max_tokens=9))])
    assert driver.scheduler.num_common_blocks == 0
    driver.go()
    common = [pinned_message(number, [*prompt_of(7, 40), number], max_tokens=9) for number in (4, 5)]
    driver.step([(0, message) for message in common])
    assert driver.scheduler.num_common_blocks == 10


def test_an_aborted_request_leaves_what_it_has_computed() -> None:
    driver = PinDriver(small_config(100, budget=16))
    driver.step([(0, pinned_message(1, prompt_of(7, 80), Pin("s", 10_000)))])
    driver.step()
    driver.step([(0, Abort(pack_numbers([1])))])
    strangers(driver, 100, 30)
    (again,) = driver.go(pinned_message(2, prompt_of(7, 80), Pin("s", 10_000)))
    assert (again.cached, driver.inbox.pinned[0, 2][0].num_promised) == (32, 32)


def test_a_folder_keeps_pins_over_a_restart_and_longer_than_other_files(tmp_path: Path) -> None:
    """After pins and many other prompts, the folder has room for few files. The next engine finds the pinned ones."""
    config = exchange_config(num_host_blocks=60, num_blocks=40, max_tenant_pinned_share=0.5)
    size = 4 * 8 + 64  # more than a block's file
    first = ExchangeDriver(tmp_path / "kv", config, max_bytes=50 * size)
    session = prompt_of(7, 40)
    first.run(pinned_message(1, session, Pin("s", 3_600_000)))
    released = prompt_of(9, 32)
    first.run(pinned_message(2, released, Pin("gone", 3_600_000)))
    first.step(others=[(0, ReleasePin(1, "gone"))])
    for number in range(100, 125):
        first.run(pinned_message(number, prompt_of(number, 24)))
    first.folder.make_room()
    first.close()
    second = ExchangeDriver(tmp_path / "kv", config, max_bytes=50 * size)
    found = second.run(pinned_message(3, [*session, 5], Pin("s", 3_600_000)))
    assert found.cached == 40
    assert second.driver.inbox.pinned[0, 3][0].num_promised == 0  # this engine has promised nothing
    assert second.run(pinned_message(4, [*released, 5])).cached == 0
    second.close()


def test_a_release_does_not_give_up_files_of_another_pin(tmp_path: Path) -> None:
    driver = ExchangeDriver(tmp_path / "kv", exchange_config(num_host_blocks=60, num_blocks=40))
    driver.run(pinned_message(1, prompt_of(7, 16), Pin("a", 10_000)))
    driver.run(pinned_message(2, [*prompt_of(7, 16), *prompt_of(8, 8)], Pin("b", 10_000)))
    driver.driver.step([(0, ReleasePin(1, "b"))])
    (order,) = (one for one in driver.engine.take_orders() if isinstance(one, Retain))
    assert (len(order.contents), order.ttl_ms) == (2, 0)
    driver.close()


def test_pins_change_no_token() -> None:
    """Many tenants with pins at random, short of blocks, at two depths."""
    rng = random.Random(3)
    for depth in (1, 2):
        driver = PinDriver(small_config(40, max_num_seqs=4, budget=16, depth=depth, max_tenant_pinned_share=0.4))
        messages = []
        for number in range(80):
            prompt = [*prompt_of(rng.randrange(4), rng.choice([0, 8, 20])), *rng.choices(range(3, 9), k=3)]
            pins = [Pin(rng.choice(["", "x"]), rng.choice([1, 5, 20]))] * rng.randrange(2)
            message = pinned_message(
                number, prompt, *pins, tenant=rng.choice(["", "t"]), max_tokens=rng.randrange(1, 9)
            )
            messages.append(message)
            driver.step([(0, message)], number * 10**6)
        driver.go(now_ns=10**9)
        for message in messages:
            assert driver.inbox.received[0, message.number].tokens == expected_tokens(message, 156)
        driver.step([(0, GetPins(1))], 10**12)
        assert driver.scheduler.pool.num_free == driver.scheduler.pool.num_blocks - 1
        assert not len(driver.scheduler.pins.blocks)
