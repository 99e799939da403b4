"""Roots of the prefix cache: the content number that a request's first KV block follows.

Requests share blocks only under one root, so a root identifies everything except tokens that changes a block's content.
The engine and programs that predict its cache, such as a router, compute it in the same way.
"""

from collections.abc import Sequence
from hashlib import blake2b

from ipc.wire.messages import Submission

#: Root of a request without parts.
PLAIN_ROOT = -1
CACHE_SALT = "salt"
TENANT = "tenant"
ADAPTER = "adapter"


def root_content(parts: Sequence[tuple[str, bytes]]) -> int:
    """Return a negative int64 that identifies `parts`: what distinguishes blocks of requests with the same tokens.

    parts: (tag, value) in the order that all requests use. Parts with an empty value are left out; without parts the
    root is PLAIN_ROOT. In the hash, each tag and value is preceded by its length, so different lists give different
    input.
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


def root_of_salt(cache_salt: str, tenant: str = "", adapter: str = "") -> int:
    """Return the root of a request that has a cache salt, a tenant and an adapter's digest ("" = none)."""
    if not (cache_salt or tenant or adapter):
        return PLAIN_ROOT
    parts = (ADAPTER, adapter), (TENANT, tenant), (CACHE_SALT, cache_salt)
    return root_content([(tag, value.encode()) for tag, value in parts])


def root_of_weights(fingerprint: str) -> int:
    """Return what the exclusive or adds to all roots if the model has other weights than at the engine's start."""
    return int.from_bytes(blake2b(fingerprint.encode(), digest_size=8, person=b"engine-core root").digest()) >> 2


def root_of_message(message: Submission) -> int:
    """Return the root of the blocks of a message's requests."""
    digest = "" if message.adapter is None else message.adapter.digest
    return root_of_salt(message.cache_salt, message.tenant, digest)
