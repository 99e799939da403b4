"""Outputs leave before the fleet notes them, and whatever follows finds them noted."""

import msgspec
import numpy as np
import pytest

from frontend.fleet.forwarding import forward, forward_row, only_new
from ipc.wire.kv_events import KVBlocksStored
from ipc.wire.messages import Abort, FinishReason, Outputs
from ipc.wire.scheduling_messages import KVEvents, RequestEvents
from tests.fake_tokens import fake_tokens
from tests.frontend.fleet.stand import VOCAB, Stand

PROMPT = [5, 6, 7]


def first_output(stand: Stand, max_tokens: int) -> tuple[int, Outputs]:
    """Return the row of client 1's request at its replica, and that replica's first output, which it has not sent."""
    fleet = stand.fleet
    (row,) = fleet.requests.rows_of_client(1)
    at = int(fleet.requests.replica[row])
    welcome = fleet.replicas.by_row[at].welcome
    assert welcome is not None
    numbers = np.array([fleet.requests.ticket(row)], "<u4").tobytes()
    token = np.array(fake_tokens(PROMPT, max_tokens, VOCAB, 0)[:1], "<i4").tobytes()
    return at, Outputs(welcome.epoch, 1, numbers, bytes(4), b"\1\0", token, started=numbers + bytes(4))


def test_what_is_sent_and_what_is_noted() -> None:
    stand = Stand(1)
    fleet = stand.fleet
    stand.submit(1, 1, PROMPT, max_tokens=2)
    at, one = first_output(stand, 2)
    (row,) = fleet.requests.rows_of_client(1)
    fleet.receive(at, one, stand.now)
    ((client, sent),) = fleet.take_messages()
    assert isinstance(sent, Outputs)
    assert (client, sent.numbers, sent.started, sent.tokens) == (1, b"\1\0\0\0", b"\1" + bytes(7), one.tokens)
    assert (fleet.requests.num_waiting, fleet.requests.num_output(row)) == (0, 0), "room is noted at once, tokens later"
    last = msgspec.structs.replace(one, step=2, positions=b"\1\0\0\0", started=b"", finish=bytes([FinishReason.LENGTH]))
    again = msgspec.structs.replace(one, started=b"")
    fleet.receive(at, again, stand.now)  # finds the first one noted
    fleet.receive(at, last, stand.now)
    assert [message.positions for _, message in fleet.take_messages() if isinstance(message, Outputs)] == [b"\1\0\0\0"]
    assert fleet.has_unfinished, "there is something to note"
    fleet.abort(1, Abort(b"\1\0\0\0"))  # of a request that has ended
    assert fleet.take_messages() == []
    assert not stand.fleet.requests.num_live


def test_an_end_of_what_has_not_begun_is_noted_at_once() -> None:
    stand = Stand(1)
    stand.submit(1, 1, PROMPT, max_tokens=2)
    at, one = first_output(stand, 2)
    fleet = stand.fleet
    fleet.receive(
        at,
        msgspec.structs.replace(one, counts=bytes(2), tokens=b"", started=b"", finish=bytes([FinishReason.ABORT])),
        stand.now,
    )
    assert (fleet.requests.num_waiting, fleet.requests.num_waiting_tokens) == (0, 0), "its client finds room"
    assert not stand.fleet.requests.num_live


def test_a_replica_is_lost_for_what_is_noted_late() -> None:
    stand = Stand(2)
    message = stand.submit(1, 1, PROMPT, max_tokens=4)
    at, one = first_output(stand, 4)
    stand.fleet.receive(at, one, stand.now)
    events = [KVBlocksStored(bytes(8), b"", b"", 4)]
    stand.fleet.receive(at, KVEvents(one.epoch, 1, 0, events), stand.now)  # what it is shows when it is noted
    stand.fleet.receive(at, KVEvents(one.epoch, 1, 1, events), stand.now)
    stand.exchange()
    stand.run()
    stand.check(1, message)
    assert stand.fleet.dispatch.num_moved == 1
    assert not stand.fleet.requests.num_live


@pytest.mark.parametrize("seed", range(4))
def test_one_row_is_forwarded_as_many_are(seed: int) -> None:
    chance, stand, num_alike = np.random.default_rng(seed), Stand(1), 0
    for number in range(3):
        stand.submit(1 + number % 2, number, [5 + number], max_tokens=9, n=1 + number % 2, temperature=0.5)
    fleet, tickets = stand.fleet, [1, 2, 3, 99]
    for _ in range(400):
        ticket, count = int(chance.choice(tickets)), int(chance.integers(0, 3))
        numbers = np.array([ticket], "<u4").tobytes()
        events = RequestEvents(numbers, bytes(2), bytes([1]), bytes(1), bytes(4), bytes(8))
        outputs = Outputs(
            epoch=1,
            step=1,
            numbers=numbers,
            positions=bytes([int(chance.random() < 0.1), 0, 0, 0]),
            counts=bytes([count, 0]),
            tokens=bytes(4 * (count + int(chance.random() < 0.1))),
            choices=b"" if chance.random() < 0.8 else bytes([int(chance.integers(0, 2)), 0]),
            finish=b"" if chance.random() < 0.5 else bytes([int(chance.integers(0, 6))]),
            started=b"" if chance.random() < 0.5 else np.array([chance.choice(tickets), 8], "<u4").tobytes(),
            events=None if chance.random() < 0.5 else events,
            drafts=b"" if chance.random() < 0.9 else numbers + bytes(12),
        )
        one = forward_row(fleet.requests, outputs, 4)
        if one is not None:
            assert forward(fleet.requests, only_new(fleet.requests, outputs), 4) == [(one.client, one.message)]
            num_alike += 1
    assert num_alike > 50
