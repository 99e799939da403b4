"""Delay: prompts gather for a while so that more of them share a step (vLLM 0.x's scheduler_delay_factor)."""

from core.batch.request import Request


class Delay:
    """The delay of starts.

    No request starts before the first in the queue has waited `factor` times as long as the last step that started
    requests took, unless no request runs.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._began_ns: int | None = None  # of the last step, where it started requests
        self._latency_ns = 0  # of the last step that started requests

    def begin_step(self, now_ns: int) -> None:
        """Note the beginning of a step, which is the end of the step before."""
        if self._began_ns is not None:
            self._latency_ns = now_ns - self._began_ns
            self._began_ns = None

    def has_passed(self, now_ns: int, first: Request, num_running: int) -> bool:
        """Return whether requests may start. first: the first request in the queue."""
        return not num_running or now_ns - first.arrival_ns >= self._factor * self._latency_ns

    def end_step(self, now_ns: int, num_started: int) -> None:
        """Note how many requests this step, which began at now_ns, has started."""
        if num_started:
            self._began_ns = now_ns
