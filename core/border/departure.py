"""Departure: when a draining engine ends its sessions: once everything has finished, or at a given time."""

from ipc.wire.messages import BeginDrain, EngineStopping
from ipc.wire.start_messages import EXIT_RESTART


class Departure:
    """What the owner requested of the drain. Written with the socket's lock held. Times: monotonic seconds."""

    def __init__(self) -> None:
        self._move_at: float | None = None
        self.comes_back = False  # another engine will take over this address: new requests wait for it

    def ask(self, message: BeginDrain, now: float) -> None:
        """Handle the owner's call. If there are several, the last one counts."""
        self._move_at = now + message.move_after_ms / 1000 if message.move_after_ms >= 0 else None
        self.comes_back = message.comes_back

    def due_s(self, now: float) -> float | None:
        """Return the seconds until unfinished requests move to another engine, or None if they finish here."""
        return None if self._move_at is None else max(0.0, self._move_at - now)

    @property
    def exit_code(self) -> int:
        """Return the exit code of the process after this drain."""
        return EXIT_RESTART if self.comes_back else 0

    @property
    def last_message(self) -> EngineStopping:
        """Return the last message of the sessions. Clients resume unfinished requests elsewhere, or here later."""
        return EngineStopping("", self.comes_back or self._move_at is not None)
