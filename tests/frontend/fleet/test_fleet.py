"""The pure fleet over engine cores: placement, exact failover, aborts, holds, pauses, drains, poison."""

import numpy as np
import pytest

from frontend.fleet.membership import SILENCE_S
from frontend.fleet.replicas import ReplicaState
from frontend.fleet.suspects import MARGIN
from ipc.wire.messages import Abort, ErrorCode, FinishReason, GetStatistics, Statistics
from tests.fake_options import fake_options
from tests.frontend.fleet.stand import Stand


def prompts(count: int) -> list[list[int]]:
    return [[5 + index, *range(20, 30 + index % 5)] for index in range(count)]


def test_requests_run_as_on_one_engine() -> None:
    stand = Stand(3)
    sent = [stand.submit(1 + index % 3, index, prompt) for index, prompt in enumerate(prompts(20))]
    stand.run()
    for index, message in enumerate(sent):
        stand.check(1 + index % 3, message)
    assert set(stand.placed) == set(stand.replicas)
    stand.check_empty()


@pytest.mark.parametrize("moment", [0, 2, 9, 21])
def test_a_killed_replica_is_a_pause(moment: int) -> None:
    stand = Stand(3)
    sent = [
        stand.submit(1, index, prompt, n=1 + index % 3, temperature=0.8 * (index % 3 > 0), max_tokens=9 + index)
        for index, prompt in enumerate(prompts(16))
    ]
    stand.turn(moment)
    stand.kill("ipc:///1")
    stand.turn(5)
    stand.stop("ipc:///0")
    stand.start("ipc:///1")
    stand.run()
    for message in sent:
        stand.check(1, message)
    assert not stand.failed
    stand.check_empty()


def test_a_request_survives_any_number_of_replicas() -> None:
    stand = Stand(3)
    sent = stand.submit(1, 1, [5, 6, 7], max_tokens=240)
    for _ in range(3):
        stand.turn(MARGIN + 10)
        home = stand.placed[-1]
        stand.kill(home)
        stand.start(home)
    stand.run()
    stand.check(1, sent)
    assert len(stand.placed) == 4
    stand.check_empty()


def test_requests_wait_while_there_is_no_replica() -> None:
    stand = Stand(1, patience_s=2.0)
    sent = stand.submit(1, 1, [7, 8, 9])
    stand.turn(4)
    stand.kill("ipc:///0")
    stand.turn(30)
    assert stand.fleet.dispatch.num_queued == 1
    stand.start("ipc:///0")
    stand.run()
    stand.check(1, sent)
    stand.kill("ipc:///0")
    stand.submit(1, 2, [7, 8, 9])
    stand.run()
    assert stand.failed[1, 2].code == ErrorCode.UNAVAILABLE
    stand.check_empty()


def test_a_replica_that_says_nothing_is_lost() -> None:
    """It stays connected: without a bound its streams would wait for ever."""
    stand = Stand(2)
    sent = stand.submit(1, 0, [7, 8, 9])
    stand.turn(4)
    stand.now += 1000.0  # a long silence of others: nothing is held against who has just spoken
    stand.turn(1)
    home = stand.placed[-1]
    stand.replicas[home].is_mute = True
    replica = stand.fleet.replicas.find(home)
    assert replica is not None
    for _ in range(int(2 * SILENCE_S) - 1):
        stand.now += 1.0
        stand.turn(1)
    assert (replica.state, len(stand.placed)) == (ReplicaState.OPEN, 1)
    for _ in range(3):
        stand.now += 1.0
        stand.turn(1)
    assert (replica.state, replica.reason) == (ReplicaState.LOST, "it has said nothing for 60 s")
    stand.run()
    stand.check(1, sent)
    assert stand.placed[-1] != home


def test_a_replica_that_is_paused_gives_signs_of_life() -> None:
    stand = Stand(2)
    sent = stand.submit(1, 0, [7, 8, 9])
    stand.turn(4)
    home = stand.replicas[stand.placed[-1]]
    home.is_paused = True
    for _ in range(int(5 * SILENCE_S)):
        stand.now += 1.0
        stand.turn(1)
    home.is_paused = False
    stand.run()
    stand.check(1, sent)
    assert len(stand.placed) == 1


def test_a_prompt_goes_where_it_is_cached() -> None:
    stand = Stand(4)
    long = list(range(30, 70))
    stand.submit(1, 0, long)
    stand.run()
    home = stand.placed[-1]
    for index in range(1, 6):
        stand.submit(1, index, [*long, index + 5])
        assert stand.placed[-1] == home
        stand.run()
    stand.submit(1, 10, [*long, 9], cache_salt="other")
    stand.submit(1, 11, [*long, 9], tenant="other")
    assert home not in stand.placed[-2:]
    stand.run()
    homes = stand.placed[-2:]
    stand.submit(1, 12, [*long, 10], cache_salt="other")
    stand.run()
    stand.submit(1, 13, [*long, 10], tenant="other")
    assert stand.placed[-2:] == homes
    stand.run()
    stand.kill(home)
    stand.turn(2)
    stand.submit(1, 14, long)
    assert stand.placed[-1] != home
    stand.run()
    stand.check_empty()


def test_a_hot_prefix_does_not_drown_its_replica() -> None:
    stand = Stand(3)
    long = list(range(30, 46))
    stand.submit(1, 0, long)
    stand.run()
    stand.placed.clear()
    for index in range(1, 31):
        stand.submit(1, index, [*long, index + 5])
    assert max(map(stand.placed.count, stand.placed)) < 20
    assert len(set(stand.placed)) == 3
    stand.run()


@pytest.mark.parametrize("policy", ["prefix", "least_loaded", "round_robin"])
def test_a_seed_decides_between_equals(policy: str) -> None:
    runs = []
    for seed in (1, 1, 2, 3):
        stand = Stand(4, policy=policy, seed=seed)
        for index, prompt in enumerate(prompts(12)):
            stand.submit(1, index, prompt, max_tokens=1)
            stand.turn()
        stand.run()
        runs.append(stand.placed)
    assert runs[0] == runs[1]
    assert all(set(run) == set(stand.replicas) for run in runs)
    assert policy == "round_robin" or len({tuple(run) for run in runs}) > 1


def test_aborts_end_requests_wherever_they_are() -> None:
    stand = Stand(2)
    sent = [stand.submit(1, index, prompt, n=2, temperature=0.5) for index, prompt in enumerate(prompts(6))]
    stand.turn(5)
    stand.fleet.abort(1, Abort(np.array([0, 1, 99], "<u4").tobytes()))
    stand.fleet.abort(1, Abort(np.array([2, 2], "<u4").tobytes(), np.array([1, 7], "<u2").tobytes()))
    stand.fleet.abort(2, Abort(np.array([3], "<u4").tobytes()))  # not this client's
    for address in list(stand.replicas):
        stand.kill(address)
    stand.turn(2)  # in the queue now
    stand.fleet.abort(1, Abort(np.array([4], "<u4").tobytes()))
    stand.start("ipc:///0")
    stand.run()
    for number in (0, 1, 4):
        assert stand.finish[1, number, 0] == stand.finish[1, number, 1] == FinishReason.ABORT
    assert stand.finish[1, 2, 1] == FinishReason.ABORT
    assert stand.finish[1, 2, 0] == FinishReason.LENGTH
    stand.check(1, sent[3])
    stand.check(1, sent[5])
    stand.check_empty()


def test_a_client_that_leaves_leaves_nothing() -> None:
    stand = Stand(2)
    for index, prompt in enumerate(prompts(8)):
        stand.submit(1 + index % 2, index, prompt)
    stand.turn(4)
    stand.fleet.leave(1)
    stand.run()
    assert {client for client, _, _ in stand.finish} == {2}
    stand.check_empty()


def test_held_requests_give_their_room_back_and_go_on() -> None:
    stand = Stand(2)
    held = [stand.submit(1, index, prompt) for index, prompt in enumerate(prompts(6))]
    other = stand.submit(2, 0, [9, 9, 9])
    stand.turn(5)
    stand.fleet.hold(1)
    stand.turn(3)
    lengths = {key: len(tokens) for key, tokens in stand.tokens.items() if key[0] == 1}
    held.append(stand.submit(1, 6, [3, 4, 5]))
    stand.turn(40)
    assert lengths == {key: len(tokens) for key, tokens in stand.tokens.items() if key[0] == 1}
    assert all(sum(one.core.scheduler.get_request_counts()) == 0 for one in stand.replicas.values())
    stand.check(2, other)
    stand.fleet.release(1, stand.now)
    stand.run()
    for message in held:
        stand.check(1, message)
    stand.check_empty()


@pytest.mark.parametrize("all_requests", [False, True])
def test_a_pause_ends_no_stream(all_requests: bool) -> None:
    stand = Stand(2)
    begun = stand.submit(1, 0, [4, 5, 6])
    stand.turn(5)
    stand.fleet.pause(all_requests=all_requests)
    later = stand.submit(1, 1, [5, 6, 7])
    stand.turn(40)
    assert stand.tokens[1, 1, 0] == []
    assert (len(stand.tokens[1, 0, 0]) == 20) is not all_requests
    stand.fleet.resume(stand.now)
    stand.run()
    stand.check(1, begun)
    stand.check(1, later)
    stand.check_empty()


def test_a_full_replica_is_asked_again_and_others_before() -> None:
    stand = Stand(2)
    for replica in stand.replicas.values():
        replica.refuses_from = 2
    sent = [stand.submit(1, index, prompt) for index, prompt in enumerate(prompts(12))]
    assert stand.fleet.dispatch.num_queued > 0
    stand.run(2000)
    for message in sent:
        stand.check(1, message)
    stand.check_empty()


def test_the_queue_is_bounded() -> None:
    stand = Stand(1, max_queued=3)
    stand.replicas["ipc:///0"].refuses_from = 0
    for index, prompt in enumerate(prompts(5)):
        stand.submit(1, index, prompt)
    assert {key: failed.code for key, failed in stand.failed.items()} == {
        (1, 3): ErrorCode.RESOURCE_EXHAUSTED,
        (1, 4): ErrorCode.RESOURCE_EXHAUSTED,
    }
    stand.replicas["ipc:///0"].refuses_from = None
    stand.run()
    stand.check_empty()


def test_a_deadline_holds_in_the_queue_too() -> None:
    stand = Stand(1)
    stand.kill("ipc:///0")
    stand.turn()
    stand.submit(1, 1, [5, 6], deadline_ms=100)
    stand.turn(20)
    assert stand.failed[1, 1].code == ErrorCode.DEADLINE_EXCEEDED
    stand.check_empty()


@pytest.mark.parametrize("move_after_s", [None, 0.0, 0.05])
def test_a_replica_leaves_under_load(move_after_s: float | None) -> None:
    stand = Stand(3)
    sent = [stand.submit(1, index, prompt, max_tokens=30) for index, prompt in enumerate(prompts(30))]
    stand.turn(6)
    replica = stand.fleet.replicas.find("ipc:///0")
    assert replica is not None
    stand.fleet.drain(replica, stand.now, move_after_s=move_after_s)
    stand.turn(10)
    assert (stand.fleet.replicas.find("ipc:///0") is None) is (move_after_s is not None)
    stand.run()
    assert stand.fleet.replicas.find("ipc:///0") is None
    for message in sent:
        stand.check(1, message)
    stand.check_empty()
    stand.fleet.membership.join("ipc:///0")
    stand.turn(3)
    assert stand.fleet.replicas.is_open.sum() == 3


def test_a_replica_that_drains_itself_loses_nothing() -> None:
    stand = Stand(2)
    sent = [stand.submit(1, 0, [5, 6, 7])]
    stand.turn(3)
    stand.replicas[stand.placed[0]].is_draining = True
    sent += [stand.submit(1, index + 1, prompt) for index, prompt in enumerate(prompts(8))]
    stand.turn(4)
    stand.stop(stand.placed[0])
    stand.run()
    for message in sent:
        stand.check(1, message)
    assert not stand.failed
    stand.check_empty()


def test_another_model_is_refused_with_the_reason() -> None:
    stand = Stand(2)
    stand.start("ipc:///9", executor_options=fake_options(vocab_size=501))
    stand.start("ipc:///8", max_model_len=128)
    for address in ("ipc:///9", "ipc:///8"):
        stand.fleet.membership.join(address)
    stand.turn(3)
    other, shorter = (stand.fleet.replicas.find(address) for address in ("ipc:///9", "ipc:///8"))
    assert other is not None
    assert shorter is not None
    assert "another model: fake (fake-1-501-1)" in other.reason
    assert "its max_model_len is 128" in shorter.reason
    for index, prompt in enumerate(prompts(9)):
        stand.submit(1, index, prompt)
    assert set(stand.placed) == {"ipc:///0", "ipc:///1"}
    stand.run()
    stand.start("ipc:///9")  # the right one
    stand.turn(150)
    assert other.state.name == "OPEN"


def test_a_poison_is_failed_and_nobody_else() -> None:
    stand = Stand(4)
    for replica in stand.replicas.values():
        replica.poison = 77
    innocent = [stand.submit(1, index, prompt, max_tokens=60) for index, prompt in enumerate(prompts(12))]
    stand.turn(3)
    stand.submit(2, 1, [77, 6, 7])
    stand.run(1000)
    for message in innocent:
        stand.check(1, message)
    failed = stand.failed.pop((2, 1))
    assert failed.code == ErrorCode.INTERNAL
    assert failed.message.count("ipc:///") == 4 - len(stand.replicas) <= 3
    assert not stand.failed
    stand.check_empty()


def test_a_poison_alone_is_failed_after_two_replicas() -> None:
    stand = Stand(3)
    for replica in stand.replicas.values():
        replica.poison = 77
    stand.submit(2, 1, [77, 6, 7])
    stand.run()
    assert stand.failed[2, 1].code == ErrorCode.INTERNAL
    assert len(stand.replicas) == 1
    stand.check_empty()


def test_statistics_are_those_of_all_replicas() -> None:
    stand = Stand(3)
    for index, prompt in enumerate(prompts(9)):
        stand.submit(1, index, prompt)
    stand.run()
    stand.fleet.call(1, GetStatistics(5), stand.now)
    stand.run()
    (statistics,) = stand.answers
    assert isinstance(statistics, Statistics)
    assert (statistics.call, statistics.num_finished, statistics.num_generation_tokens) == (5, 9, 180)
    assert statistics.num_blocks == 3 * 400
