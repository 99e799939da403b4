"""The engine loop: what it does in which round, with an engine and a socket that are scripts."""

from collections.abc import Sequence
from typing import Any, cast

from core.process.loop import run


class _Script:
    """The engine, its IO thread and its inbox, in rounds: inputs, and the number of requests that live after them."""

    def __init__(self, rounds: Sequence[tuple[list[Any], int]]) -> None:
        self._rounds = list(rounds)
        self._num_living = self._num_then = 0
        self.done = list[Any]()
        self.inbox = self.departure = self
        self.exit_code, self.last_message, self.will_be_replaced = 7, None, False

    @property
    def has_ended(self) -> bool:
        return not self._rounds

    @property
    def has_unfinished(self) -> bool:
        return self._num_living > 0

    @property
    def has_work(self) -> bool:
        return self._num_living == 1  # two of them wait for their client

    def take(self, timeout: float) -> list[Any]:
        self.done.append(timeout)
        inputs, self._num_then = self._rounds.pop(0)
        return inputs

    def step(self, inputs: list[Any], _: int) -> list[Any]:
        self.done.append("step")
        self._num_living = self._num_then
        return []

    def count_waiting(self) -> tuple[int, int]:
        return 0, 0

    def settle(self, *_: int) -> None:
        pass

    def put(self, _: list[Any]) -> None:
        pass

    def finish(self, *_: Any) -> None:
        pass


def test_the_engine_rests_after_each_wait_in_which_nothing_came_and_nothing_lived() -> None:
    script = _Script([([], 0), (["a request"], 1), ([], 2), ([], 0), ([], 0), ([], 0)])
    each = cast("Any", script)
    code = run(each, each, lambda: False, rest=lambda: script.done.append("rest"), idle_s=9.0)
    assert code == 7
    assert script.done == [9.0, "rest", 9.0, "step", 0, "step", 0.1, "step", 9.0, "rest", 9.0, "rest"]


def test_what_is_prepared_ahead_comes_before_a_rest() -> None:
    script = _Script([([], 0)] * 4)
    each, left = cast("Any", script), [True, True, False, False]
    run(each, each, lambda: left.pop(0), rest=lambda: script.done.append("rest"), idle_s=9.0)
    assert script.done == [0, 0, 9.0, "rest", 9.0, "rest"]
