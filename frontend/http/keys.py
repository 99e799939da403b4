"""Keys: who may use the server, and what each key may do."""

import msgspec


class Key(msgspec.Struct, frozen=True):
    """One caller."""

    name: str
