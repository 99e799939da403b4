"""Call: the base of all calls to an engine, and the rules of each call."""

import msgspec


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A call. `call` is its number; the answer has the same number."""

    call: int


class CallRule(msgspec.Struct, frozen=True):
    """The rules of every call of one kind."""

    answer: type[msgspec.Struct]  # unless the answer is CallFailed
    is_owners: bool = False  # clients other than the engine's owner get PERMISSION_DENIED
    is_at_border: bool = False  # answered by the border; the engine core never sees it
