"""StageLink: receives the residual stream from the previous stage of a pipeline, and sends it to the next one."""

import numpy as np

from ipc.machine.channel import Channel
from ipc.tables.arrays import Floats
from kernels.elements import FLOAT32
from kernels.memory.aligned import aligned_empty

_SEPARATOR = "\n"


class StageLink:
    """The channels to the neighbours. before: None = this is the first stage; after: None = this is the last stage."""

    def __init__(self, before: Channel | None, after: Channel | None) -> None:
        self._before, self._after = before, after
        self._buffer: Floats = np.zeros((0, 0), np.float32)

    def pass_on(self, names: list[str]) -> list[str]:
        """Return the first stage's names, and pass them on. names: this stage's. Errors: ChannelEndedError."""
        first = names if self._before is None else self._before.receive().decode().split(_SEPARATOR)
        if self._after is not None:
            self._after.send(_SEPARATOR.join(first).encode())
        return first

    def room(self, num_tokens: int, width: int) -> Floats:
        """Return the memory [num_tokens, width] float32 for receive() to fill. It is reused if it is large enough."""
        if len(self._buffer) < num_tokens:
            self._buffer = aligned_empty((1 << (num_tokens - 1).bit_length(), width), FLOAT32)
            self._buffer.fill(0.0)
        return self._buffer[:num_tokens]

    def receive(self, room: Floats) -> None:
        """Wait for the residual stream of a step's tokens, and write it to `room`. Errors: ChannelEndedError."""
        assert self._before is not None, "the first stage receives nothing"
        received = np.frombuffer(self._before.receive(), np.float32)
        assert received.size == room.size, f"the previous stage sent {received.size} numbers, expected {room.size}"
        room[:] = received.reshape(room.shape)

    def send(self, hidden: Floats) -> None:
        """Send on the residual stream of a step's tokens. Errors: ChannelEndedError."""
        assert self._after is not None, "the last stage sends nothing"
        self._after.send(hidden.tobytes())
