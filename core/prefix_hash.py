"""Names of KV blocks by content: a chained hash over (parent block, tokens, extra keys).

blake2b-128 is cryptographic, so a hit needs no comparison of tokens; it is keyed by nothing, so a log replays equal.
"""

from hashlib import blake2b

from ipc.paged_rows import Int32s

DIGEST_BYTES = 16


def root_digest(cache_salt: str) -> bytes:
    """Parent of a request's first block. Extra keys are tagged, so that a salt can never equal a key of another kind."""
    salt = cache_salt.encode()
    return blake2b(b"cache_salt" + len(salt).to_bytes(4, "little") + salt, digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, token_ids: Int32s) -> bytes:
    """token_ids: the block's int32[block_size]."""
    return blake2b(parent + token_ids.tobytes(), digest_size=DIGEST_BYTES).digest()


def extend_digests(digests: list[bytes], token_ids: Int32s, block_size: int, cache_salt: str) -> None:
    """Append the digests of the blocks in token_ids, which begin after the blocks that have one; a partial block is left out."""
    parent = digests[-1] if digests else root_digest(cache_salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_digest(parent, token_ids[start : start + block_size])
        digests.append(parent)
