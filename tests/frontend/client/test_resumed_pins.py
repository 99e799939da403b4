"""A request that was accepted with a required pin is not failed by the next engine for lack of room."""

from msgspec.structs import replace

from frontend.client.journal import Journal
from ipc.wire.messages import AddRequest
from ipc.wire.pin_messages import Pin, PinAnswer
from tests.core.driving import add_message


def test_a_pin_that_was_granted_is_asked_for_again_and_not_required() -> None:
    journal, pin = Journal(), Pin("s", 60_000, is_required=True)
    journal.add(replace(add_message(7, [5, 6, 7]), pins=(pin,)), streaming=False, now=1.0)
    (again,) = journal.resubmission(7, 2.0)
    assert isinstance(again, AddRequest)
    assert again.pins == (pin,)  # no engine has answered
    journal.note_pins(7, [PinAnswer(0, 0)])
    (again,) = journal.resubmission(7, 2.0)
    assert isinstance(again, AddRequest)
    assert again.pins == (Pin("s", 60_000),)
    assert journal.read(7).pins == [PinAnswer(0, 0)]
    journal.note_pins(8, [])  # a request that is gone
