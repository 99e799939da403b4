"""Calls on pins at the border: what is wrong is refused there, and a key's tenants are its own."""

import pytest
from msgspec.structs import replace

from core.border.key_use import KeyUse
from core.border.pin_calls import owned, pin_call_refusal
from core.border.validation import validate_request
from ipc.errors import InvalidRequestError
from ipc.keys.quota import NO_QUOTA
from ipc.wire.call import Call
from ipc.wire.messages import CallFailed, ErrorCode, ResetPrefixCache
from ipc.wire.pin_messages import ForkPin, GetPins, Pin, ReleasePin
from tests.core.driving import add_message


def test_a_keys_pins_are_its_own() -> None:
    use = KeyUse("alice", NO_QUOTA, 0.0)
    assert owned(ReleasePin(1, "s"), use) == ReleasePin(1, "s", "alice")
    assert owned(ForkPin(1, "s", "t", 5, "bob"), use) == ForkPin(1, "s", "t", 5, "alice/bob")
    assert owned(GetPins(1, "bob"), None) == GetPins(1, "bob")
    assert owned(ResetPrefixCache(1), use) == ResetPrefixCache(1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (ForkPin(3, "s", "", 5), "must not be empty"),
        (ForkPin(3, "s", "n" * 257, 5), "257 characters; at most 256"),
        (ForkPin(3, "s", "t", 0), "from 1 ms to 604800000 ms"),
        (ReleasePin(3, "s", "t" * 65), "65 bytes; at most 64"),
        (GetPins(3, "t" * 65), "65 bytes; at most 64"),
    ],
)
def test_wrong_calls_are_refused(call: Call, says: str) -> None:
    refused = pin_call_refusal(call)  # type: ignore[arg-type]
    assert isinstance(refused, CallFailed)
    assert (refused.call, refused.code, says in refused.message) == (3, ErrorCode.INVALID_ARGUMENT, True)


def test_right_calls_are_not() -> None:
    for call in (ReleasePin(1, "s", "t"), ForkPin(1, "s", "t", 5), GetPins(1)):
        assert pin_call_refusal(call) is None


@pytest.mark.parametrize(
    ("pin", "says"),
    [
        (Pin("n" * 257, 5), "257 characters"),
        (Pin("s", 0), "from 1 ms"),
        (Pin("s", 604_800_001), "from 1 ms"),
        (Pin("s", 5, 4), "a pin of 4 tokens: the prompt has 3"),
        (Pin("s", 5, -1), "a pin of -1 tokens"),
    ],
)
def test_wrong_pins_of_requests_are_refused(pin: Pin, says: str) -> None:
    message = replace(add_message(1, [5, 6, 7]), pins=(pin,))
    with pytest.raises(InvalidRequestError, match=says):
        validate_request(message, vocab_size=1000, max_model_len=100, max_logprobs=0)
