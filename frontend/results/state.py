"""State: the interface of a request's state, independent of its kind of answer."""

from typing import Protocol, TypeVar

from frontend.client.progress import Progress

Output = TypeVar("Output", covariant=True)


class State(Protocol[Output]):
    """One request from its caller's side: a RequestState or a PoolingState."""

    number: int
    finished: bool

    @property
    def wanted(self) -> list[tuple[int, int]]:
        """Return (choice, position from which its Progress must begin) for each Progress that update() takes next."""

    def update(self, *progress: Progress) -> Output | None:
        """Take a Progress for each wanted choice; return the output, None if there is nothing to show yet."""

    def take_stopped(self) -> list[int]:
        """Return the choices that a stop string has ended since the last call."""
