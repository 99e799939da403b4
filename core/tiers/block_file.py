"""The file of one KV block: a header with its name and a digest, then the block's bytes. Peers send the same bytes.

KV connectors (core/tiers/connector.py) get BlockToStore and BlockToLoad: they keep and bring these bytes, and cannot
read or write the memory of the cache in another way.

The digest is an HMAC (SHA-256, its first 16 bytes) with the key of the blocks' names. So a file that is not exactly
what was written is not accepted as a block, whether it is damaged or forged without the key. It is read into memory
first and checked there, so that changes during reading are detected too.
"""

import errno
import hmac
import os
import struct
import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b

from core.tiers.portable_names import NAME_BYTES

MAGIC = b"ECKVBLK2"
_DIGEST_BYTES = 16
_PERSON = b"engine-core mac"  # 16 bytes at most
#: Magic, name, bytes of the block, digest of everything else in the file. Little-endian, without padding.
_HEAD = struct.Struct(f"<8s{NAME_BYTES}sQ{_DIGEST_BYTES}s")
HEAD_BYTES = _HEAD.size
_IOV_MAX = 1024  # buffers per call (POSIX: at least 16, Linux: 1024)


class BlockToStore:
    """A block of the engine, for a connector to keep. Valid until the call that it is given to returns.

    name: NAME_BYTES, secret as the key is. num_bytes: of the packed block.
    """

    __slots__ = ("_is_unchanged", "_key", "_parts", "name", "num_bytes")

    def __init__(
        self, name: bytes, parts: Sequence[memoryview], key: bytes, is_unchanged: Callable[[], bool] = lambda: True
    ) -> None:
        """Make it of a block's bytes, in parts. is_unchanged: whether they are still the block's."""
        self.name, self.num_bytes = name, HEAD_BYTES + sum(map(len, parts))
        self._parts, self._key, self._is_unchanged = parts, key, is_unchanged

    def is_unchanged(self) -> bool:
        """Return whether all bytes that were read until now are the block's: the engine does not hold it."""
        return self._is_unchanged()

    def pack(self) -> bytearray | None:
        """Return the block with its header. None: the engine has overwritten it."""
        data = pack_block(self.name, self._parts, self._key)
        return data if self._is_unchanged() else None

    def write_to(self, fd: int) -> None:
        """Write the packed block to an empty file without a copy; is_unchanged() then tells whether it is whole.

        Errors: OSError.
        """
        write_block(fd, self.name, self._parts, self._key)


class BlockToLoad:
    """Room for a block in the engine's memory. It accepts the packed block of its name, and nothing else.

    name: NAME_BYTES. num_bytes: of the packed block. is_loaded: whether the block is there. was_damaged: whether it was
    given something else.
    """

    __slots__ = ("_key", "_lock", "_parts", "is_loaded", "name", "num_bytes", "was_damaged")

    def __init__(self, name: bytes, parts: Sequence[memoryview], key: bytes) -> None:
        self.name, self.num_bytes = name, HEAD_BYTES + sum(map(len, parts))
        self._parts: Sequence[memoryview] | None = parts
        self._key, self._lock = key, threading.Lock()
        self.is_loaded = self.was_damaged = False

    def take(self, data: bytes | bytearray | memoryview) -> bool:
        """Copy a packed block into its place. Return False if it is not an intact one of this name and size."""
        view = memoryview(data).cast("B")
        return self._fill(lambda parts: unpack_block(view, self.name, parts, self._key))

    def read_from(self, fd: int) -> bool:
        """Read a packed block from the start of a file into its place, without a copy. Return as take().

        Errors: OSError.
        """
        return self._fill(lambda parts: read_block(fd, self.name, parts, self._key))

    def close(self) -> None:
        """Accept nothing from now on: the place may be given to another block."""
        with self._lock:
            self._parts = None

    def _fill(self, fill: Callable[[Sequence[memoryview]], bool]) -> bool:
        with self._lock:  # a connector's own thread may still be filling it when it is closed
            if self._parts is None or self.is_loaded:
                return self.is_loaded
            self.is_loaded = fill(self._parts)
            self.was_damaged |= not self.is_loaded
            return self.is_loaded


def write_block(fd: int, name: bytes, parts: Sequence[memoryview], key: bytes) -> None:
    """Write the file of a block, whose bytes are in these parts, to an empty file. Errors: OSError."""
    size = sum(map(len, parts))
    head = _HEAD.pack(MAGIC, name, size, _digest(name, size, parts, key))
    rest = [memoryview(head), *parts]
    while rest:
        written = os.writev(fd, rest[:_IOV_MAX])
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        rest = _after(rest, written)


def read_block(fd: int, name: bytes, parts: Sequence[memoryview], key: bytes) -> bool:
    """Read a block into these parts. Return False if the file is not an intact one with this name and size.

    Errors: OSError.
    """
    size, head = sum(map(len, parts)), bytearray(HEAD_BYTES)
    if os.fstat(fd).st_size != HEAD_BYTES + size:
        return False
    rest = [memoryview(head), *parts]
    while rest:
        count = os.readv(fd, rest[:_IOV_MAX])
        if not count:
            return False  # it was truncated while it was read
        rest = _after(rest, count)
    magic, found, found_size, digest = _HEAD.unpack(head)
    if (magic, found, found_size) != (MAGIC, name, size):
        return False
    return hmac.compare_digest(digest, _digest(name, size, parts, key))


def pack_block(name: bytes, parts: Sequence[memoryview], key: bytes) -> bytearray:
    """Return the contents that the file of a block would have."""
    size = sum(map(len, parts))
    data, at = bytearray(HEAD_BYTES + size), HEAD_BYTES
    for part in parts:
        data[at : at + len(part)] = part
        at += len(part)
    _HEAD.pack_into(data, 0, MAGIC, name, size, _digest(name, size, [memoryview(data)[HEAD_BYTES:]], key))
    return data


def is_block(data: memoryview, name: bytes, key: bytes) -> bool:
    """Return whether these are the bytes of an intact block with this name."""
    size = len(data) - HEAD_BYTES
    if size < 0:
        return False
    magic, found, found_size, digest = _HEAD.unpack_from(data)
    if (magic, found, found_size) != (MAGIC, name, size):
        return False
    return hmac.compare_digest(digest, _digest(name, size, [data[HEAD_BYTES:]], key))


def unpack_block(data: memoryview, name: bytes, parts: Sequence[memoryview], key: bytes) -> bool:
    """Copy a packed block into these parts.

    Return False, without copying, if it is not an intact one with this name and size.
    """
    if len(data) != HEAD_BYTES + sum(map(len, parts)) or not is_block(data, name, key):
        return False
    at = HEAD_BYTES
    for part in parts:
        part[:] = data[at : at + len(part)]
        at += len(part)
    return True


def _digest(name: bytes, size: int, parts: Sequence[memoryview], key: bytes) -> bytes:
    of_files = blake2b(key=key, person=_PERSON, digest_size=32).digest()  # names use the key itself
    value = hmac.new(of_files, MAGIC + name + size.to_bytes(8, "little"), "sha256")
    for part in parts:
        value.update(part)
    return value.digest()[:_DIGEST_BYTES]


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return what remains of the parts after the first `count` bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[index + 1 :]]
        count -= len(part)
    return []
