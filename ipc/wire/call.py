"""Call: the base of all questions to an engine beside requests, and what the table of calls says of each."""

import msgspec


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One question. `call` numbers it: the answer has the same number."""

    call: int


class CallRule(msgspec.Struct, frozen=True):
    """What holds for every call of one kind."""

    answer: type[msgspec.Struct]  # unless the answer is CallFailed
    is_owners: bool = False  # others than the engine's owner get PERMISSION_DENIED
    is_at_border: bool = False  # answered by the border; the engine core never sees it
