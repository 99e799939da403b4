"""Messages on pins: what requests ask to be kept in the prefix cache, the engine's answers, and calls on named pins.

docs/pins.md has the contract.
"""

from typing import Annotated

import msgspec

from ipc.errors import InvalidRequestError
from ipc.wire.call import Call

#: Most pins of one request.
MAX_PINS = 8
#: Most characters of a pin's name.
MAX_PIN_NAME_CHARS = 256
#: Longest time of a pin, in ms: a week.
MAX_PIN_TTL_MS = 7 * 24 * 3600 * 1000
#: Most pins in one PinList.
MAX_LISTED_PINS = 1000


class Pin(msgspec.Struct, frozen=True, array_like=True):
    """Asks the engine to keep the whole KV blocks of a prompt's first tokens for a time from the request's arrival."""

    name: str  # a pin of the same tenant and name is replaced; "" = the pin is known by its tokens
    ttl_ms: int
    num_tokens: int = 0  # first tokens of the prompt; 0 = all
    is_required: bool = False  # if it cannot be pinned, the request fails


#: The pins of a request. More are refused before they are made.
RequestPins = Annotated[tuple[Pin, ...], msgspec.Meta(max_length=MAX_PINS)]


class PinAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one pin of a request.

    Earlier pins of the tenant promised the prompt's first num_promised tokens. If the request starts with fewer cached
    tokens, the promise was not kept.
    """

    num_tokens: int  # first tokens of the prompt that are kept from now on, or from when they are computed; 0 = refused
    num_promised: int
    refusal: str = ""  # why it was refused


class Pinned(msgspec.Struct, frozen=True, array_like=True, tag=69):
    """The answers to the pins of a request, in their order. It is sent when the request arrives."""

    number: int
    pins: list[PinAnswer]


class ReleasePin(Call, frozen=True, array_like=True, tag=42):
    """End a named pin. Answered by CallDone, or by INVALID_ARGUMENT if there is none."""

    name: str
    tenant: str = ""


class ForkPin(Call, frozen=True, array_like=True, tag=43):
    """Pin what a named pin has under another name too, or replace that. Answered by CallDone.

    Answered by INVALID_ARGUMENT if there is no such pin, and by PIN_REFUSED if there is no room.
    """

    name: str
    new_name: str
    ttl_ms: int
    tenant: str = ""


class GetPins(Call, frozen=True, array_like=True, tag=44):
    """Ask for a tenant's pins. Answered by PinList."""

    tenant: str = ""


class PinState(msgspec.Struct, frozen=True, array_like=True):
    """A pin of one tenant."""

    name: str  # "" = it is known by its tokens
    num_tokens: int  # that it asks for, in whole blocks
    num_held_tokens: int  # of these: in the KV cache
    left_ms: int  # until it ends


class PinList(msgspec.Struct, frozen=True, array_like=True, tag=88):
    """A tenant's pins, at most MAX_LISTED_PINS, and the tokens that it may pin."""

    call: int
    pins: list[PinState]
    num_pinned_tokens: int = 0  # different ones
    max_pinned_tokens: int = 0  # its share
    num_left_out: int = 0  # pins beyond the most in one answer


def granted(pins: tuple[Pin, ...]) -> tuple[Pin, ...]:
    """Return the pins of a request that was accepted with them: the next engine must not fail it for lack of room."""
    return tuple(msgspec.structs.replace(pin, is_required=False) for pin in pins)


def check_pin_name(name: str) -> None:
    """Check the name of a pin that a call names. Errors: InvalidRequestError."""
    if not name:
        raise InvalidRequestError("a pin's name must not be empty")
    if len(name) > MAX_PIN_NAME_CHARS:
        raise InvalidRequestError(f"a pin's name has {len(name)} characters; at most {MAX_PIN_NAME_CHARS} are allowed")


def check_pin_ttl(ttl_ms: int) -> None:
    """Check the time of a pin. Errors: InvalidRequestError."""
    if not 1 <= ttl_ms <= MAX_PIN_TTL_MS:
        raise InvalidRequestError(f"a pin's time must be from 1 ms to {MAX_PIN_TTL_MS} ms (7 days), got {ttl_ms} ms")


def check_pins(pins: tuple[Pin, ...], num_prompt_tokens: int) -> None:
    """Check the pins of a request. Errors: InvalidRequestError that says what is wrong and what would be right."""
    if len(pins) > MAX_PINS:
        raise InvalidRequestError(f"the request has {len(pins)} pins; at most {MAX_PINS} are allowed")
    for pin in pins:
        if pin.name:
            check_pin_name(pin.name)
        check_pin_ttl(pin.ttl_ms)
        if not 0 <= pin.num_tokens <= num_prompt_tokens:
            raise InvalidRequestError(
                f"a pin of {pin.num_tokens} tokens: the prompt has {num_prompt_tokens}, and 0 pins all of them"
            )
