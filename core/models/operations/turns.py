"""Turns: two threads use the C kernels one after the other, and neither waits for more than one turn of the other."""

import threading
from collections.abc import Callable
from typing import TypeVar

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class Turns:
    """A lock that is given in the order in which it is asked for, by at most two threads."""

    def __init__(self) -> None:
        self._next, self._using = threading.Lock(), threading.Lock()

    def in_turn(self, work: Callable[[_Argument], _Result]) -> Callable[[_Argument], _Result]:
        """Return the same work, done in turns.

        Whoever waits for the lock holds the place of the next one, so a thread that asks at once again comes second.
        """

        def wait_and_work(argument: _Argument) -> _Result:
            with self._next:
                self._using.acquire()
            try:
                return work(argument)
            finally:
                self._using.release()

        return wait_and_work
