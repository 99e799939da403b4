"""Pins at a fleet: the replica's answer reaches the client under its own number; calls on pins are refused."""

from ipc.wire.messages import CallFailed, ErrorCode
from ipc.wire.pin_messages import GetPins, Pin, Pinned
from tests.frontend.fleet.stand import Stand


def test_answers_to_pins_have_the_clients_numbers() -> None:
    stand = Stand(2)
    sent = [
        stand.submit(client, 7, [client, *range(20, 60)], pins=(Pin("s", 60_000, 32), Pin("", 60_000)))
        for client in (1, 2, 3)
    ]
    stand.run()
    for client, message in enumerate(sent, 1):
        stand.check(client, message)
    answers = [one for one in stand.answers if isinstance(one, Pinned)]
    assert [one.number for one in answers] == [7, 7, 7]
    assert all(one.pins[0].num_tokens == 32 for one in answers)
    stand.check_empty()


def test_pins_of_a_fleet_are_those_of_its_replicas() -> None:
    stand = Stand(1)
    stand.fleet.call(1, GetPins(5), stand.now)
    stand.exchange()
    (answer,) = stand.answers
    assert isinstance(answer, CallFailed)
    assert (answer.code, answer.message) == (ErrorCode.INVALID_ARGUMENT, "a fleet does not support this call")
