"""Quota: the limits of clients with one key, from the list of an engine's clients (ipc/keys/curve.py)."""

import re
from collections.abc import Sequence

import msgspec

from ipc.errors import ConfigError

_LIMIT = re.compile(r"(concurrent|rpm|tpm)=([1-9][0-9]{0,17})")


class Quota(msgspec.Struct, frozen=True):
    """The limits of one key; None = none."""

    concurrent: int | None = None  # unfinished requests
    rpm: int | None = None  # requests a minute
    tpm: int | None = None  # tokens a minute, of prompts and outputs

    def words(self) -> list[str]:
        """Return the limits in the form that read_quota() reads."""
        return [f"{name}={value}" for name, value in msgspec.structs.asdict(self).items() if value is not None]


NO_QUOTA = Quota()


def read_quota(words: Sequence[str], place: str) -> Quota:
    """Return the quota given by words such as "rpm=60". place: for errors. Errors: ConfigError."""
    limits: dict[str, int] = {}
    for word in words:
        match = _LIMIT.fullmatch(word)
        if match is None or match[1] in limits:
            raise ConfigError(
                f"{place}: {word!r:.80} is not a limit of a client, or is given twice; known: concurrent=N, rpm=N and "
                "tpm=N, N above 0"
            )
        limits[match[1]] = int(match[2])
    return Quota(**limits)
