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
        self._buffers: dict[str, Floats] = {}

    def pass_on(self, names: list[str]) -> list[str]:
        """Return the first stage's names, and pass them on. names: this stage's. Errors: ChannelEndedError."""
        first = names if self._before is None else self._before.receive().decode().split(_SEPARATOR)
        if self._after is not None:
            self._after.send(_SEPARATOR.join(first).encode())
        return first

    def room(self, name: str, num_tokens: int, width: int) -> Floats:
        """Return memory [num_tokens, width] float32 for receive() to fill. That of a name is reused if it suffices."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < num_tokens:
            buffer = self._buffers[name] = aligned_empty((1 << (num_tokens - 1).bit_length(), width), FLOAT32)
            buffer.fill(0.0)
        return buffer[:num_tokens]

    def receive(self, *rooms: Floats) -> None:
        """Wait for what the previous stage sends of a step's tokens, and write it there. Errors: ChannelEndedError."""
        assert self._before is not None, "the first stage receives nothing"
        received, size = np.frombuffer(self._before.receive(), np.float32), sum(room.size for room in rooms)
        assert received.size == size, f"the previous stage sent {received.size} numbers, expected {size}"
        begin = 0
        for room in rooms:
            room[:] = received[begin : begin + room.size].reshape(room.shape)
            begin += room.size

    def send(self, *numbers: Floats) -> None:
        """Send on the residual stream of a step's tokens, and what else the next stage expects.

        Errors: ChannelEndedError.
        """
        assert self._after is not None, "the last stage sends nothing"
        self._after.send(b"".join(each.tobytes() for each in numbers))
