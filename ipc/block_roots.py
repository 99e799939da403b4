"""Roots of the prefix cache: the content number that a request's first KV block follows.

Requests share blocks only under one root, so a root stands for everything but tokens that changes what a block holds.
The engine and whoever predicts its cache, such as a router, compute it alike.
"""

from collections.abc import Sequence
from hashlib import blake2b

#: The root of a request that has nothing but tokens.
PLAIN_ROOT = -1
CACHE_SALT = "salt"


def root_content(parts: Sequence[tuple[str, bytes]]) -> int:
    """Return a negative int64 for what distinguishes a request's blocks from others with the same tokens.

    parts: (tag, value) in the order that all requests use; parts with an empty value are left out, and PLAIN_ROOT is
    the root without parts. Tags and values are framed by their lengths, so no two lists run into one another.
    """
    digest = blake2b(digest_size=8, person=b"engine-core root")
    is_plain = True
    for tag, value in parts:
        if value:
            is_plain = False
            name = tag.encode()
            digest.update(len(name).to_bytes(8, "little") + name + len(value).to_bytes(8, "little"))
            digest.update(value)
    return PLAIN_ROOT if is_plain else -2 - (int.from_bytes(digest.digest(), "little") >> 2)


def root_of_salt(cache_salt: str) -> int:
    """Return the root of a request that has a cache salt, or none (""), and nothing else beside its tokens."""
    return root_content([(CACHE_SALT, cache_salt.encode())]) if cache_salt else PLAIN_ROOT
