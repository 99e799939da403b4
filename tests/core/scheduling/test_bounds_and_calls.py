"""Bounds of what waits, requests sent twice, aborts and deadlines through the wire; and the closed calls."""

from collections.abc import Callable

import msgspec
import pytest

from core.border.inbox import Inbox
from core.border.reception import MAX_TOKENIZERS
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import (
    MAX_ABORTED,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    BeginDrain,
    CallDone,
    CallFailed,
    ErrorCode,
    FinishReason,
    GetModelInformation,
    GetTokenizer,
    Hello,
    ModelInformation,
    Pause,
    PauseMode,
    Refused,
    RequestFailed,
    Resume,
    Shutdown,
    TokenizerFiles,
    Welcome,
)
from tests.columns import pack_numbers
from tests.core.running_engine import LONG, NUM_ROWS, Running, expected, is_free, owner, start_engine, wait_for
from tests.raw_client import RawClient, request

__all__ = ["start_engine"]  # a fixture


# --- bounds ------------------------------------------------------------------------------------------------------


def test_queue_bounds(start: Callable[..., Running]) -> None:
    running = start(max_num_queued_requests=3, lease_ms=60_000)
    with owner(running) as client:
        client.send(Pause(1, PauseMode.NEW))
        client.receive(CallDone)
        for number in range(5):
            client.add(number, [1, number])
        for number in (3, 4):
            failed = client.receive(RequestFailed)
            assert (failed.number, failed.code, failed.retry_after_ms) == (number, ErrorCode.RESOURCE_EXHAUSTED, 1000)
            assert (
                failed.message == "3 requests are waiting to start, which is max_num_queued_requests; send again later"
            )
        client.send(Abort(pack_numbers([0])))
        client.receive_any()
        wait_for(client, lambda statistics: statistics.num_waiting == 2)
        client.add(5, [1, 5])
        client.send(Resume(2))
        client.receive(CallDone)
        assert client.finish(1, 2, 5) == [expected([1, number], 8) for number in (1, 2, 5)]


def test_each_choice_counts_as_soon_as_it_is_sent() -> None:
    inbox = Inbox()
    message = msgspec.structs.replace(request(1, [1, 2, 3]), params=SamplingParams(n=4), delivered=[b"\1\0\0\0"])
    inbox.put(1, message)
    assert (inbox.num_queued_requests, inbox.num_queued_tokens) == (4, 13)
    inbox.drain()
    inbox.settle(4, 13)
    assert (inbox.num_queued_requests, inbox.num_queued_tokens) == (4, 13)


def test_what_a_lost_session_had_is_taken_again_though_the_queue_is_full(start: Callable[..., Running]) -> None:
    running = start(max_num_queued_requests=NUM_ROWS, lease_ms=60_000)
    with owner(running) as client, RawClient(running.address) as lost:
        for number in range(NUM_ROWS):
            lost.add(number, [1, number], max_tokens=LONG)
        wait_for(client, lambda statistics: statistics.num_running == NUM_ROWS)
        client.send(Pause(1, PauseMode.NEW))
        client.receive(CallDone)
        for number in range(NUM_ROWS):
            client.add(number, [2, number])
        wait_for(client, lambda statistics: statistics.num_waiting == NUM_ROWS)
        with RawClient(running.address, hello=False) as again:
            again.send(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "again", lost.welcome.session_token))
            again.receive(Welcome)
            for number in range(NUM_ROWS + 1):
                again.add(number, [1, number])
            assert again.receive(RequestFailed).number == NUM_ROWS  # it had no more than that
            client.send(Resume(2))
            client.receive(CallDone)
            assert again.finish(*range(NUM_ROWS)) == [expected([1, number], 8) for number in range(NUM_ROWS)]


def test_a_request_whose_end_was_lost_takes_nobody_elses_place(start: Callable[..., Running]) -> None:
    """Found by tests/simulation: of two requests that a lost session had, one had finished unheard. The
    client sent both again, and a full queue refused one of them."""
    running = start(max_num_queued_requests=1, lease_ms=60_000)
    with owner(running) as client, RawClient(running.address) as lost:
        lost.add(0, [1], max_tokens=2)
        lost.finish(0)
        lost.add(1, [1, 1], max_tokens=LONG)
        wait_for(client, lambda statistics: statistics.num_running == 1)
        client.send(Pause(1, PauseMode.NEW))
        client.receive(CallDone)
        client.add(0, [2])
        wait_for(client, lambda statistics: statistics.num_waiting == 1)
        with RawClient(running.address, hello=False) as again:
            again.send(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "again", lost.welcome.session_token))
            again.receive(Welcome)
            again.add(0, [1], max_tokens=2)
            again.add(1, [1, 1])
            again.add(2, [1, 2])
            assert again.receive(RequestFailed).number == 2
            client.send(Resume(2))
            client.receive(CallDone)
            assert again.finish(0, 1) == [expected([1], 2), expected([1, 1], 8)]


def test_token_and_byte_bounds(start: Callable[..., Running]) -> None:
    running = start(max_num_queued_tokens=1000, max_client_bytes=16_000, lease_ms=60_000)
    with owner(running) as client, RawClient(running.address) as other:
        client.send(Pause(1, PauseMode.NEW))
        client.receive(CallDone)
        other.add(0, [1] * 900)
        wait_for(other, lambda statistics: statistics.num_waiting == 1)
        other.add(1, [1] * 101)
        assert (
            "900 tokens are waiting to start, and max_num_queued_tokens is 1000" in other.receive(RequestFailed).message
        )
        other.add(2, [1] * 100)
        client.send(Resume(2))
        client.receive(CallDone)
        other.finish(0, 2)
        other.add(3, [1] * 1200, max_tokens=LONG // 2)
        other.receive_any()
        other.add(4, [1] * 500)
        failed = other.receive(RequestFailed)
        assert "and max_client_bytes is 16000; send again later" in failed.message
        client.add(1, [1] * 500)  # another client's bytes are its own
        client.finish(1)
        other.send(Abort(pack_numbers([3])))
        other.finish(3)
        other.add(5, [1] * 500)
        other.finish(5)


def test_a_request_sent_twice_is_one_request(start: Callable[..., Running]) -> None:
    running = start(lease_ms=60_000)
    with RawClient(running.address) as client:
        for _ in range(3):
            client.add(1, [1], max_tokens=2000)
        client.add(1, [2], max_tokens=2000)
        failed = client.receive(RequestFailed)
        assert (failed.number, failed.code) == (1, ErrorCode.ALREADY_EXISTS)
        assert failed.message == "request number 1 is in use in this session; numbers are never reused"
        assert client.finish(1) == [expected([1], 2000)]
        client.add(1, [1], max_tokens=2000)
        assert client.receive(RequestFailed).message.startswith("request number 1 is finished in this session")
        assert client.statistics().num_finished == 1


def test_aborts_at_any_moment_are_idempotent(start: Callable[..., Running]) -> None:
    running = start(lease_ms=60_000)
    with RawClient(running.address) as client:
        abort = Abort(pack_numbers([1, 1, 2, 99]))
        client.send(abort, request(1, [1], LONG), abort, abort, request(2, [2], LONG), abort, abort)
        client.finish(1, 2)
        assert client.finished == {1: FinishReason.ABORT, 2: FinishReason.ABORT}
        client.send(abort)
        assert is_free(client.statistics())


def test_an_abort_has_a_bounded_length(start: Callable[..., Running]) -> None:
    running = start(lease_ms=60_000)
    with RawClient(running.address) as client:
        client.add(1, [1], max_tokens=LONG)
        client.send(Abort(pack_numbers([1] * (MAX_ABORTED + 1))))
        assert client.receive(Refused).message == "an Abort may have at most 65536 numbers, this one has 65537"
        client.send(Abort(pack_numbers([1] * MAX_ABORTED)))
        client.finish(1)
        assert client.finished == {1: FinishReason.ABORT}


def test_a_deadline_ends_what_runs_and_what_waits(start: Callable[..., Running]) -> None:
    running = start(lease_ms=60_000)
    with owner(running) as client:
        client.send(msgspec.structs.replace(request(1, [1], LONG), deadline_ms=20))
        failed = client.receive(RequestFailed)
        assert (failed.number, failed.code) == (1, ErrorCode.DEADLINE_EXCEEDED)
        client.send(Pause(1, PauseMode.ALL))
        client.receive(CallDone)
        client.send(msgspec.structs.replace(request(2, [1], LONG), deadline_ms=20))
        assert client.receive(RequestFailed).number == 2
        assert is_free(client.statistics())


# --- calls -------------------------------------------------------------------------------------------------------


def test_owner_calls_are_the_owners(start: Callable[..., Running]) -> None:
    running = start(lease_ms=60_000)
    with RawClient(running.address) as client, RawClient(running.address, hello=False) as liar:
        liar.send(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "liar", b"", b"x" * 16))
        liar.receive(Welcome)
        for one in (client, liar):
            for call in (Pause(1, PauseMode.ALL), Resume(2), BeginDrain(3), Shutdown(4)):
                one.send(call)
                failed = one.receive(CallFailed)
                assert (failed.call, failed.code) == (call.call, ErrorCode.PERMISSION_DENIED)
        client.add(1, [1])
        assert client.finish(1) == [expected([1], 8)]


def test_pause_all_and_resume(start: Callable[..., Running]) -> None:
    running = start(lease_ms=60_000)
    with owner(running) as client:
        client.add(1, [1], max_tokens=3000)
        client.receive_any()
        client.send(Pause(5, PauseMode.ALL))
        assert client.receive(CallDone).call == 5
        client.add(2, [2])
        first = wait_for(client, lambda statistics: statistics.num_waiting == 1)
        assert client.statistics().num_steps == first.num_steps
        assert first.num_running == 1
        client.send(Resume(6), Resume(7))
        assert [client.receive(CallDone).call for _ in range(2)] == [6, 7]
        assert client.finish(1, 2) == [expected([1], 3000), expected([2], 8)]


@pytest.mark.parametrize("mode", list(PauseMode))
def test_a_drain_ends_a_pause(start: Callable[..., Running], mode: PauseMode) -> None:
    """Nobody could resume a draining engine: it lets no client in."""
    running = start(lease_ms=60_000)
    with owner(running) as client:
        client.add(1, [1], max_tokens=2000)
        client.receive_any()
        client.send(Pause(5, mode))
        client.receive(CallDone)
        client.add(2, [2])
        wait_for(client, lambda statistics: statistics.num_waiting == 1)
        client.send(BeginDrain(6))
        assert client.receive(CallDone).call == 6
        assert client.finish(1, 2) == [expected([1], 2000), expected([2], 8)]


def test_model_information_and_a_bounded_number_of_tokenizers(start: Callable[..., Running]) -> None:
    running = start(lease_ms=60_000)
    with RawClient(running.address) as client:
        client.send(GetModelInformation(3))
        answer = client.receive(ModelInformation)
        assert (answer.call, answer.executor, answer.block_size, answer.eos_token_ids) == (3, "fake", 16, [2])
        for call in range(MAX_TOKENIZERS):
            client.send(GetTokenizer(call))
            assert client.receive(TokenizerFiles).call == call
        client.send(GetTokenizer(9))
        assert client.receive(CallFailed).code == ErrorCode.RESOURCE_EXHAUSTED
