"""TokenNames: renames a capture's tokens so that equal beginnings stay equal and nothing else is revealed.

A token's name is a keyed hash of the token and of the names before it. The key is generated for one redaction and then
discarded. Two sequences have equal names exactly as far as their tokens are equal: after the same beginning, different
tokens have different names. The same token at two positions has two names, so neither frequencies nor a dictionary
reveal what it was.
"""

import secrets
from hashlib import blake2b

import numpy as np

from ipc.errors import CaptureFileError
from ipc.tables.arrays import AnyInts, Int32s

_STATE_BYTES = 16
_TRIES = 64  # tries after which the remaining names are checked


class TokenNames:
    """Names from a vocabulary without the reserved ids, which only name tokens that end requests."""

    def __init__(self, vocab_size: int, reserved: set[int]) -> None:
        self._key = secrets.token_bytes(32)
        self._free = np.setdiff1d(np.arange(vocab_size), np.array(sorted(reserved), np.int64)).tolist()
        self._taken: dict[tuple[bytes, int], int] = {}  # by (state, name): the token that has the name there
        self._num_taken: dict[bytes, int] = {}  # number of names used, by state

    @property
    def num_names(self) -> int:
        """Return the number of names that a token can have."""
        return len(self._free)

    def begin(self, label: str) -> bytes:
        """Return the state before the first token. label: what the sequence belongs to, such as its cache salt."""
        return blake2b(label.encode(), digest_size=_STATE_BYTES, key=self._key).digest()

    def follow(self, state: bytes, name: int) -> bytes:
        """Return the state after a name."""
        return blake2b(state + name.to_bytes(4, "little"), digest_size=_STATE_BYTES, key=self._key).digest()

    def follow_all(self, state: bytes, names: AnyInts) -> bytes:
        """Return the state after these names."""
        for name in names.tolist():
            state = self.follow(state, name)
        return state

    def name(self, state: bytes, token: int) -> int:
        """Return the name of a token in a state.

        Errors: CaptureFileError if more tokens follow than there are names, because prompts may also have reserved ids.
        """
        attempt = 0
        while True:
            text = state + token.to_bytes(4, "little", signed=token < 0) + attempt.to_bytes(4, "little")
            drawn = int.from_bytes(blake2b(text, digest_size=8, key=self._key).digest(), "little")
            name: int = self._free[drawn % len(self._free)]
            owner = self._taken.get((state, name))
            if owner == token:
                return name
            if owner is None:
                self._taken[state, name] = token
                self._num_taken[state] = self._num_taken.get(state, 0) + 1
                return name
            attempt += 1
            if attempt % _TRIES == 0 and self._num_taken[state] >= len(self._free):
                raise CaptureFileError(
                    f"more than {len(self._free)} different tokens follow the same beginning: there are no names for "
                    "them; a capture of so small a vocabulary cannot be redacted"
                )

    def name_all(self, state: bytes, tokens: AnyInts) -> tuple[Int32s, bytes]:
        """Return the names of consecutive tokens, and the state after them."""
        names = []
        for token in tokens.tolist():
            names.append(self.name(state, token))
            state = self.follow(state, names[-1])
        return np.array(names, np.int32), state

    def word(self, text: str) -> str:
        """Return another word for a salt, a tenant or another name; "" for none."""
        return blake2b(text.encode(), digest_size=8, key=self._key, person=b"word").hexdigest() if text else ""
