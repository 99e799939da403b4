"""TokenAdapters: the adapters of a step's tokens."""

from typing import Any, NamedTuple

from ipc.tables.arrays import Ints


class TokenAdapters(NamedTuple):
    """The adapters of a step's T tokens, packed by the model's operations (Operations.pack_adapter)."""

    packed: tuple[Any, ...]  # the distinct adapters
    of_token: Ints  # [T] index in `packed`; -1 = none
