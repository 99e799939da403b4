"""RememberedModules: the names and paths of an engine's adapters, kept for the owner's next engine.

They are in a memory file held by the owner, like the black box, so they survive any end of this process.
"""

import os

import msgspec

from ipc.wire.messages import DECODE_ERRORS

_MAX_BYTES = 1 << 20


class RememberedModules:
    """The content of the memory file. fd: its descriptor; -1 = there is none."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self) -> dict[str, str] | None:
        """Return paths by name, as left by the previous engine; None for the first engine."""
        if self._fd < 0:
            return None
        data = os.pread(self._fd, _MAX_BYTES, 0)
        size = int.from_bytes(data[:8], "little")
        try:
            return msgspec.msgpack.decode(data[8 : 8 + size], type=dict[str, str]) if size else None
        except DECODE_ERRORS:  # its writer was killed while writing
            return None

    def write(self, modules: dict[str, str]) -> None:
        """Store these paths by name. If they take more than 1 MiB, they are not stored."""
        content = msgspec.msgpack.encode(modules)
        if self._fd >= 0 and len(content) <= _MAX_BYTES - 8:
            os.pwrite(self._fd, len(content).to_bytes(8, "little") + content, 0)
