"""The border's rules for calls on pins."""

from typing import TypeVar

import msgspec

from core.border.key_use import KeyUse
from core.border.validation import check_tenant
from ipc.errors import InvalidRequestError
from ipc.wire.call import Call
from ipc.wire.messages import CallFailed, ErrorCode
from ipc.wire.pin_messages import ForkPin, GetPins, ReleasePin, check_pin_name, check_pin_ttl

_Call = TypeVar("_Call", bound=Call)


def pin_call_refusal(message: ReleasePin | ForkPin | GetPins) -> CallFailed | None:
    """Return what is wrong with a call, or None."""
    try:
        check_tenant(message.tenant)
        if isinstance(message, ForkPin):
            check_pin_name(message.new_name)
            check_pin_ttl(message.ttl_ms)
    except InvalidRequestError as error:
        return CallFailed(message.call, ErrorCode.INVALID_ARGUMENT, str(error))
    return None


def owned(message: _Call, use: KeyUse | None) -> _Call:
    """Return a call whose tenant, if it names one, is of the client's key, as tenants of requests are."""
    if use is None or not isinstance(message, ReleasePin | ForkPin | GetPins):
        return message
    return msgspec.structs.replace(message, tenant=use.tenant(message.tenant))
