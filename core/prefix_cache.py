"""PrefixCache: whole KV blocks found again by their content.

A block's name is a chained hash over (parent block, tokens, extra keys). blake2b-128 is cryptographic, so a hit needs
no comparison of tokens; it is keyed by nothing, so a log replays equal.
"""

from hashlib import blake2b

import numpy as np

from core.batch_table import BatchTable
from core.block_pool import BlockPool
from core.request import Request
from ipc.paged_rows import Int32s, Ints

DIGEST_BYTES = 16


def root_digest(cache_salt: str) -> bytes:
    """Parent of a request's first block. Extra keys are tagged: a salt can never equal a key of another kind."""
    salt = cache_salt.encode()
    return blake2b(b"cache_salt" + len(salt).to_bytes(4, "little") + salt, digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, token_ids: Int32s) -> bytes:
    """token_ids: the block's int32[block_size]."""
    return blake2b(parent + token_ids.tobytes(), digest_size=DIGEST_BYTES).digest()


def extend_digests(digests: list[bytes], token_ids: Int32s, block_size: int, cache_salt: str) -> None:
    """Append the digests of the whole blocks in token_ids, which begin where the digests end."""
    parent = digests[-1] if digests else root_digest(cache_salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_digest(parent, token_ids[start : start + block_size])
        digests.append(parent)


class PrefixCache:
    """Names the blocks of running rows in the pool, and finds the blocks of waiting requests."""

    def __init__(self, table: BatchTable, pool: BlockPool, block_size: int, enabled: bool) -> None:
        self._table = table
        self._pool = pool
        self._block_size = block_size
        self._enabled = enabled

    def find(self, request: Request) -> Int32s:
        """Blocks that hold the waiting request's first tokens; never its last token, which has to be computed; none
        where the prompt's log probabilities are wanted, for which all of it has to be."""
        if not self._enabled or request.wants_prompt_logprobs:
            return np.zeros(0, np.int32)
        start = len(request.digests) * self._block_size
        extend_digests(request.digests, request.token_ids[start:], self._block_size, request.cache_salt)
        return self._pool.find(request.digests[: (request.num_tokens - 1) // self._block_size])

    def name_full_blocks(self, rows: Ints) -> None:
        """Name the blocks whose tokens are all known and computed by the end of the step being planned.

        Whoever finds them runs in this step or a later one, and every layer stores the step's K and V before it reads.
        """
        if not self._enabled:
            return
        table = self._table
        full = np.minimum(table.num_computed_tokens[rows], table.num_tokens[rows]) // self._block_size
        more = full > table.num_hashed_blocks[rows]
        for row, end in zip(rows[more].tolist(), full[more].tolist(), strict=True):
            self._name_blocks(row, end)

    def name_started_blocks(self, row: int, num_tokens: int) -> None:
        """As name_full_blocks, for a row that starts with these tokens: who starts after it in this step finds them."""
        if self._enabled and num_tokens // self._block_size > self._table.num_hashed_blocks[row]:
            self._name_blocks(row, num_tokens // self._block_size)

    def _name_blocks(self, row: int, end: int) -> None:
        table, request = self._table, self._table.request[row]
        assert request is not None, f"row {row} is scheduled and free"
        have = len(request.digests)
        if have < end:
            tokens = table.tokens.read(row, have * self._block_size, end * self._block_size)
            extend_digests(request.digests, tokens, self._block_size, request.cache_salt)
        start = int(table.num_hashed_blocks[row])
        for index, block in enumerate(table.blocks.read(row, start, end).tolist(), start):
            self._pool.remember(block, request.digests[index])
        table.num_hashed_blocks[row] = end
