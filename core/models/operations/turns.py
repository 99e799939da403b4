"""Turns: two threads take turns using the C kernels, and neither waits for more than one turn of the other."""

import threading
from collections.abc import Callable
from typing import TypeVar

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class Turns:
    """A fair lock for at most two threads: it is granted in the order of the requests."""

    def __init__(self) -> None:
        self._next, self._using = threading.Lock(), threading.Lock()

    def in_turn(self, work: Callable[[_Argument], _Result]) -> Callable[[_Argument], _Result]:
        """Return a function that does the same work under the lock.

        The waiting thread holds the next place, so a thread that asks again at once comes second.
        """

        def wait_and_work(argument: _Argument) -> _Result:
            with self._next:
                self._using.acquire()
            try:
                return work(argument)
            finally:
                self._using.release()

        return wait_and_work
