"""Transport: the protocol by which a client sends frames to its engine and receives its answers."""

from collections.abc import Callable
from typing import Protocol

OnFrames = Callable[[list[bytes]], None]
OnDead = Callable[[str], None]
OnLost = Callable[[], bytes]


class Borrower(Protocol):
    """An event loop that receives instead of a transport's thread. Any thread calls its methods."""

    def watch(self, fd: int) -> None:
        """Call receive() now, and whenever this file descriptor is readable, instead of an earlier one; close it."""

    def look(self) -> None:
        """Call receive() soon: there may be frames without a signal at the file descriptor."""

    def collect(self, flush: Callable[[], None]) -> bool:
        """Return whether a frame may wait for the end of this turn of the loop, at which `flush` is called.

        The first frame of a turn may not wait, nor a frame from a thread other than the loop's.
        """


class Transport(Protocol):
    """Sends and receives frames. One thread at a time calls the callbacks.

    on_frames: receives a batch of frames. on_dead: receives the reason, at most once, and is the last callback.
    on_lost: called when the connection was lost and is being restored; frames not received by then are lost. It returns
    the first frame for the new connection, which may lead to another engine at another address: the client decides by
    its Welcome whether to continue. A transport that does not reconnect calls on_dead instead.
    """

    def start(self, on_frames: OnFrames, on_dead: OnDead, on_lost: OnLost) -> None:
        """Connect, and start calling the callbacks. Errors: AddressError, EngineDeadError."""

    def send(self, frame: bytes) -> None:
        """Send or queue a frame without blocking. Called by one thread at a time, not after close().

        A frame for an engine that is gone is dropped. Errors: RequestFailedError if the queue is full.
        """

    def keep_alive(self, frame: bytes, seconds: float) -> None:
        """Send this frame whenever nothing was sent for `seconds`; 0 = never. Called from on_frames."""

    def await_return(self, seconds: float) -> None:
        """Wait this long for another engine after this one is lost; 0 = the transport's own time.

        Called from on_frames.
        """

    def lend(self, borrower: "Borrower | None") -> None:
        """Let this borrower receive instead of the transport's own thread, until lend(None)."""

    def receive(self) -> bool:
        """Receive frames and call on_frames, as the borrower; return whether there are more."""

    def close(self) -> None:
        """Send queued frames for a short time, then disconnect; no callback follows."""
