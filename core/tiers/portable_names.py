"""PortableNames: names of KV blocks that are equal in every engine with the same key and secret to all others.

A name is a keyed 16-byte BLAKE2b digest: of the previous name and the block's tokens; for the first block, of
everything except tokens that a block's bytes depend on (model, kernels, layout) and of the root, which includes the
cache salt, the tenant and the adapter. So requests that share no blocks in the engine share none here. The key is a
secret of the folder that contains the blocks, or of the engines that are peers.
"""

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np

from ipc.tables.arrays import TokenIds

NAME_BYTES = 16
KEY_BYTES = 32
_PERSON = b"engine-core kv 1"  # 16 bytes at most
_BESIDE = b"window"  # its length differs from that of tokens


class PortableNames:
    """The names of one engine's blocks.

    key: KEY_BYTES secret bytes. content: text with everything that a block's bytes depend on except its tokens and its
    root.
    """

    def __init__(self, key: bytes, content: str, block_size: int) -> None:
        assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
        self.key = key
        self._begin = self._digest(f"{block_size}\n{content}".encode())
        self._block_size = block_size

    def root(self, root: int) -> bytes:
        """Return the name before the first block under this root (ipc/wire/block_roots.py)."""
        return self._digest(self._begin + root.to_bytes(8, "little", signed=True))

    def chain(self, root: int, token_ids: TokenIds) -> Iterator[bytes]:
        """Yield the name of each whole block of token_ids, in order."""
        name, size = self.root(root), 4 * self._block_size
        data = token_ids.astype("<i4", copy=False).tobytes()
        for begin in range(0, len(data) // size * size, size):
            name = self._digest(name + data[begin : begin + size])
            yield name

    def after(self, name: bytes, token_ids: TokenIds) -> bytes:
        """Return the name of the block with these tokens after the block of this name."""
        return self._digest(name + np.ascontiguousarray(token_ids, "<i4").tobytes())

    def beside(self, name: bytes) -> bytes:
        """Return the name of the window block that has the same tokens as the block of this name."""
        return self._digest(name + _BESIDE)

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=NAME_BYTES, key=self.key, person=_PERSON).digest()
