"""Prompts that one replica computes for others: where requests go, and that their streams stay whole."""

import msgspec
import pytest

from ipc.wire.messages import Abort, FinishReason
from tests.frontend.fleet.stand import CONFIG, Stand

SHORT = [5, 6, 7]


def long(number: int) -> list[int]:
    return [5 + number, *range(20, 60)]


def stand_with(count: int = 3, num_prefill: int = 1, **options: object) -> Stand:
    return Stand(count, num_prefill=num_prefill, prefill_min_tokens=16, **options)  # type: ignore[arg-type]


def test_a_long_prompt_is_computed_at_one_replica_and_its_output_at_another() -> None:
    stand = stand_with()
    sent = [stand.submit(1 + number % 2, number, long(number), max_tokens=2 + number) for number in range(12)]
    sent.append(stand.submit(1, 50, long(50), temperature=0.8, logprobs=2))
    stand.run()
    for message in sent:
        stand.check(1 if message.number == 50 else 1 + message.number % 2, message)
    assert stand.placed.count("ipc:///2") == 13
    assert {"ipc:///0", "ipc:///1"} == set(stand.placed) - {"ipc:///2"}
    assert len(stand.placed) == 26
    stand.check_empty()


def test_what_has_no_first_stage_goes_to_a_replica_at_once() -> None:
    """Short prompts, single tokens, several choices, and prompts that a replica has cached."""
    stand = stand_with()
    sent = [
        stand.submit(1, 1, SHORT),
        stand.submit(1, 2, long(2), max_tokens=1),
        stand.submit(1, 3, long(3), n=3, temperature=0.5),
    ]
    stand.run()
    sent.append(stand.submit(1, 4, [*long(2), 61]))
    stand.run()
    for message in sent:
        stand.check(1, message)
    assert "ipc:///2" not in stand.placed
    assert len(stand.placed) == 4


def test_a_stop_in_the_first_token_is_the_end() -> None:
    stand = stand_with()
    message = stand.submit(1, 1, long(1), max_tokens=9)
    stand.run()
    first = stand.tokens[1, 1, 0][0]
    stand.submit(1, 2, long(1), max_tokens=9, stop_token_ids=[first], cache_salt="another")
    stand.run()
    assert stand.tokens[1, 2, 0] == [first]
    assert stand.finish[1, 2, 0] == FinishReason.STOP
    assert stand.placed == ["ipc:///2", stand.placed[1], "ipc:///2"]
    stand.check(1, message)
    stand.check_empty()


@pytest.mark.parametrize("killed", ["ipc:///0", "ipc:///1", "ipc:///2"])
@pytest.mark.parametrize("moment", [0, 1, 2, 3, 6])
def test_any_replica_may_die_in_any_stage(killed: str, moment: int) -> None:
    stand = stand_with()
    sent = [stand.submit(1, number, long(number), max_tokens=12) for number in range(10)]
    stand.turn(moment)
    stand.kill(killed)
    sent += [stand.submit(1, 20 + number, long(20 + number), max_tokens=5) for number in range(4)]
    stand.turn(4)
    stand.start(killed)
    stand.run()
    for message in sent:
        stand.check(1, message)
    assert not stand.failed
    stand.check_empty()


def test_streams_go_on_with_the_replicas_of_one_stage_alone() -> None:
    for gone in ("ipc:///0", "ipc:///1"):
        stand = stand_with(2)
        stand.kill(gone)
        stand.turn(3)
        sent = [stand.submit(1, number, long(number)) for number in range(4)]
        stand.run()
        for message in sent:
            stand.check(1, message)
        stand.check_empty()


def test_aborts_and_clients_that_leave_in_the_first_stage() -> None:
    stand = stand_with()
    kept = stand.submit(1, 1, long(1))
    stand.submit(1, 2, long(2))
    stand.submit(2, 3, long(3))
    stand.fleet.abort(1, Abort(b"\x02\x00\x00\x00"))
    stand.fleet.leave(2)
    stand.exchange()
    stand.run()
    stand.check(1, kept)
    assert stand.finish[1, 2, 0] == FinishReason.ABORT
    assert (2, 3, 0) not in stand.finish
    stand.check_empty()


def test_a_held_client_s_requests_go_on_after_their_first_stage() -> None:
    stand = stand_with()
    sent = [stand.submit(1, number, long(number)) for number in range(3)]
    stand.fleet.hold(1)
    stand.turn(4)
    stand.fleet.release(1, stand.now)
    stand.run()
    for message in sent:
        stand.check(1, message)
    stand.check_empty()


def test_below_the_exact_level_nothing_has_two_stages() -> None:
    stand = Stand(0, prefill_min_tokens=16)
    for index in range(2):
        replica = stand.start(f"ipc:///{index}")
        welcome = msgspec.structs.replace(replica.served.welcome, numerics="L0")
        replica.served = msgspec.structs.replace(replica.served, welcome=welcome)
        stand.fleet.membership.join(f"ipc:///{index}", prefills=index == 1)
    stand.turn(3)
    sent = stand.submit(1, 1, long(1))
    stand.run()
    stand.check(1, sent)
    assert stand.placed == ["ipc:///0"]


def test_a_prompt_that_ends_at_the_longest_length_has_one_stage() -> None:
    stand = stand_with()
    assert CONFIG.max_model_len is not None
    sent = stand.submit(1, 1, list(range(20, 19 + CONFIG.max_model_len)), max_tokens=None)
    stand.run()
    assert len(stand.tokens[1, sent.number, 0]) == 1
    assert stand.placed[0] != "ipc:///2"
    stand.check_empty()


def test_roles_change_while_streams_run() -> None:
    stand = stand_with()
    sent = [stand.submit(1, number, long(number), max_tokens=6) for number in range(6)]
    stand.turn(3)
    stand.fleet.membership.join("ipc:///2")
    stand.fleet.membership.join("ipc:///0", prefills=True)
    assert stand.fleet.replicas.num_prefill == 1
    first = len(stand.placed)
    sent += [stand.submit(1, number, long(number), max_tokens=6) for number in range(6, 12)]
    stand.run()
    for message in sent:
        stand.check(1, message)
    assert stand.placed[first:].count("ipc:///0") >= 6
    assert "ipc:///2" in stand.placed[first:]
    stand.fleet.membership.join("ipc:///0")
    assert stand.fleet.replicas.num_prefill == 0
    first = len(stand.placed)
    message = stand.submit(1, 20, long(20), max_tokens=3)
    stand.run()
    stand.check(1, message)
    assert len(stand.placed) == first + 1
    stand.check_empty()
