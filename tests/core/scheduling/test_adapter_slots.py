"""max_loras: so many different adapters run at once; who waits for a slot is passed a bounded number of times."""

from typing import Any

import msgspec

from core.scheduling.decisions import Verdict
from ipc.wire.block_roots import root_of_salt
from ipc.wire.lora_messages import AdapterId
from tests.core.driving import ByHand, add_message, small_config

ADAPTERS = ["", "a" * 32, "b" * 32, "c" * 32]


def hand_with(max_loras: int, **options: Any) -> ByHand:
    config = small_config(200, max_num_seqs=12)
    return ByHand(msgspec.structs.replace(config, enable_lora=True, max_loras=max_loras, **options))


def add(hand: ByHand, number: int, adapter: int, max_tokens: int = 4) -> Any:
    message = add_message(number, [number * 100 + index for index in range(5)], max_tokens)
    digest = ADAPTERS[adapter]
    return hand.add(msgspec.structs.replace(message, adapter=AdapterId(digest) if digest else None))


def running(hand: ByHand) -> list[int]:
    return sorted(hand.scheduler.table.number[hand.scheduler.running].tolist())


def test_requests_of_one_adapter_share_a_slot_and_those_without_need_none() -> None:
    hand = hand_with(1)
    for number, adapter in enumerate((1, 1, 0, 2, 1, 0)):
        add(hand, number, adapter)
    hand.step()
    assert running(hand) == [0, 1, 2, 4, 5]
    assert hand.scheduler.decision is not None
    assert [(one.request.number, one.verdict) for one in hand.scheduler.decision.examined] == [(3, Verdict.NO_ADAPTER)]
    while hand.scheduler.has_unfinished_requests:
        hand.step()
        assert 3 not in running(hand) or running(hand) == [3]
    assert hand.scheduler.stats.num_head_no_adapter > 0


def test_the_one_that_waits_is_passed_at_most_so_often() -> None:
    """Requests of the adapter that runs keep coming: without the bound the other would wait for ever."""
    hand, passed, number = hand_with(1, admission_lookahead=3), 0, 1
    add(hand, 0, 1, 6)
    hand.step()
    add(hand, 999, 2, 2)
    while 999 not in running(hand):
        add(hand, number, 1, 6)
        number += 1
        hand.step()
        assert number < 60, "it starved"
    waiting = [n for n in range(1, number) if n in running(hand)]
    passed = number - 1 - len(hand.scheduler.waiting) - len(waiting)
    assert passed <= 3


def test_slots_come_back_with_preemptions_and_ends() -> None:
    hand = hand_with(2)
    for number, adapter in enumerate((1, 2, 3, 0)):
        add(hand, number, adapter, 3)
    hand.step()
    assert running(hand) == [0, 1, 3]
    hand.scheduler.finish_requests(0, [0])
    hand.step()
    assert running(hand) == [1, 2, 3]
    while hand.scheduler.has_unfinished_requests:
        hand.step()
    for number, adapter in enumerate((3, 2), 10):
        add(hand, number, adapter, 1)
    hand.step()
    assert not hand.scheduler.waiting.num_ready


def test_blocks_are_shared_by_content_only() -> None:
    roots = {root_of_salt(salt, tenant, adapter) for salt in ("", "x") for tenant in ("", "x") for adapter in ADAPTERS}
    assert len(roots) == 16
    assert root_of_salt("", "", "x" * 32) != root_of_salt("x" * 32) != root_of_salt("", "x" * 32)
