"""The file of one KV block: a head with its name and a checksum, then the block's bytes. Peers send the same bytes.

A file that is not exactly what was written (another length, one bit) is no block. It is read into memory first and
checked there, so a file that changes under the reader is found too.
"""

import errno
import os
import struct
import zlib
from collections.abc import Sequence

from core.tiers.portable_names import NAME_BYTES

MAGIC = b"ECKVBLK1"
#: Magic, name, bytes of the block, CRC-32 of all others of the file. Little-endian, without padding.
_HEAD = struct.Struct(f"<8s{NAME_BYTES}sQI")
HEAD_BYTES = _HEAD.size
_IOV_MAX = 1024  # buffers of one call (POSIX: at least 16, Linux: 1024)


def write_block(fd: int, name: bytes, parts: Sequence[memoryview]) -> None:
    """Write the file of a block, whose bytes are in these parts, to an empty file. Errors: OSError."""
    size = sum(map(len, parts))
    head = _HEAD.pack(MAGIC, name, size, _checksum(name, size, parts))
    rest = [memoryview(head), *parts]
    while rest:
        written = os.writev(fd, rest[:_IOV_MAX])
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        rest = _after(rest, written)


def read_block(fd: int, name: bytes, parts: Sequence[memoryview]) -> bool:
    """Read a block into these parts; return False where the file is not that of this name and size, unharmed.

    Errors: OSError.
    """
    size, head = sum(map(len, parts)), bytearray(HEAD_BYTES)
    if os.fstat(fd).st_size != HEAD_BYTES + size:
        return False
    rest = [memoryview(head), *parts]
    while rest:
        count = os.readv(fd, rest[:_IOV_MAX])
        if not count:
            return False  # it was cut while it was read
        rest = _after(rest, count)
    magic, found, found_size, checksum = _HEAD.unpack(head)
    if (magic, found, found_size) != (MAGIC, name, size):
        return False
    return bool(checksum == _checksum(name, size, parts))


def pack_block(name: bytes, parts: Sequence[memoryview]) -> bytearray:
    """Return what the file of a block would have."""
    size = sum(map(len, parts))
    data, at = bytearray(HEAD_BYTES + size), HEAD_BYTES
    for part in parts:
        data[at : at + len(part)] = part
        at += len(part)
    _HEAD.pack_into(data, 0, MAGIC, name, size, _checksum(name, size, [memoryview(data)[HEAD_BYTES:]]))
    return data


def is_block(data: memoryview, name: bytes) -> bool:
    """Return whether these are the bytes of a block of this name, unharmed."""
    size = len(data) - HEAD_BYTES
    if size < 0:
        return False
    magic, found, found_size, checksum = _HEAD.unpack_from(data)
    if (magic, found, found_size) != (MAGIC, name, size):
        return False
    return bool(checksum == _checksum(name, size, [data[HEAD_BYTES:]]))


def unpack_block(data: memoryview, name: bytes, parts: Sequence[memoryview]) -> bool:
    """Copy a packed block into these parts; return False, without a copy, where it is not that of this name and size,
    unharmed.
    """
    if len(data) != HEAD_BYTES + sum(map(len, parts)) or not is_block(data, name):
        return False
    at = HEAD_BYTES
    for part in parts:
        part[:] = data[at : at + len(part)]
        at += len(part)
    return True


def _checksum(name: bytes, size: int, parts: Sequence[memoryview]) -> int:
    value = zlib.crc32(MAGIC + name + size.to_bytes(8, "little"))
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of the parts behind the first `count` bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[index + 1 :]]
        count -= len(part)
    return []
