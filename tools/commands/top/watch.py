"""Watch: samples of a running engine, and the changes between two samples."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from frontend.client.client import EngineClient
from frontend.engine.signs import step_age_s
from ipc.errors import CallFailedError, EngineCoreError
from ipc.records.black_box import NO_READING, BlackBoxReader, find_black_box
from ipc.wire.messages import ModelInformation, Statistics
from ipc.wire.metrics_messages import Histogram, Metrics
from ipc.wire.scheduling_messages import Explanation

_WINDOW_S = 60.0  # of the quantiles
_LONG_STEP_S = 1.0
_ANSWER_S = 5.0  # then the engine counts as hung, and the last sample stays on the screen


class Look(NamedTuple):
    """An engine's answers at one time."""

    time: float  # monotonic seconds, ours
    statistics: Statistics
    metrics: Metrics
    explanation: Explanation


class Rates(msgspec.Struct, frozen=True):
    """Changes between two samples, per second; None if there were none.

    Parts of a step: means over the steps between.
    """

    tokens_per_s: float
    prompt_tokens_per_s: float
    steps_per_s: float
    step_ms: float | None
    rows_per_step: float | None
    tokens_per_step: float | None
    prefix_hit_rate: float | None
    ttft_p50_s: float | None  # of the last minute; upper bound of the bucket
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None


class Watch:
    """The engine behind `connect`, across its restarts.

    error: why the last sample failed, "" if it did not; num_lost: how often the engine was lost.
    """

    def __init__(self, connect: Callable[[], EngineClient], limit: int) -> None:
        self._connect = connect
        self._limit = limit
        self._looks: deque[Look] = deque()
        self.client: EngineClient | None = None
        self.model: ModelInformation | None = None
        self.error = ""
        self.num_lost = 0
        self._box: BlackBoxReader | None = None  # of the engine, if it is on this machine

    @property
    def last(self) -> Look | None:
        """The last successful sample."""
        return self._looks[-1] if self._looks else None

    def look(self) -> None:
        """Ask the engine; a failure is kept in `error`, and the next sample connects again.

        An engine in a long step is not asked, because it would not answer: its black box shows how long the step has
        run.
        """
        if self.client is not None and (text := self._describe_long_step()):
            self.error = text
            return
        try:
            if self.client is None:
                self.client = self._connect()
                self.model = self.client.model_information()
                self._box = find_black_box(self.client.welcome.pid)
            self._ask(self.client)
            self.error = ""
        except CallFailedError as error:
            self.error = str(error)
        except EngineCoreError as error:
            if self.client is not None:
                self.num_lost += 1
            self.error = str(error)
            self.close()

    def close(self) -> None:
        """End the session."""
        if self.client is not None:
            self.client.close()
            self.client = None

    def _describe_long_step(self) -> str:
        reading = NO_READING if self._box is None else self._box.read()
        age = step_age_s(reading, time.monotonic_ns())
        return f"step {reading.num_begun} has run for {age:.1f} s" if age > _LONG_STEP_S else ""

    def _ask(self, client: EngineClient) -> None:
        client.raise_if_ended()
        statistics = client.statistics(_ANSWER_S)
        explanation = client.explain(limit=self._limit, timeout=_ANSWER_S)
        try:
            metrics = client.metrics(_ANSWER_S)
        except CallFailedError:  # of an earlier minor
            metrics = Metrics(0, False)
        if self._looks and statistics.num_steps < self._looks[-1].statistics.num_steps:
            self._looks.clear()  # another engine, whose counters begin at 0
        self._looks.append(Look(time.monotonic(), statistics, metrics, explanation))
        while self._looks[-1].time - self._looks[0].time > _WINDOW_S:
            self._looks.popleft()

    def rates(self) -> Rates | None:
        """Return the changes between the last two samples; None before the second."""
        if len(self._looks) < 2:
            return None
        first, before, now = self._looks[0], self._looks[-2], self._looks[-1]
        seconds, old, new = now.time - before.time, before.statistics, now.statistics
        steps = new.num_steps - old.num_steps
        queries = new.prefix_cache_queries - old.prefix_cache_queries
        ttft = _between(first.metrics, now.metrics, "time_to_first_token_seconds")
        itl = _between(first.metrics, now.metrics, "inter_token_latency_seconds")
        return Rates(
            tokens_per_s=(new.num_generation_tokens - old.num_generation_tokens) / seconds,
            prompt_tokens_per_s=(new.num_prompt_tokens - old.num_prompt_tokens) / seconds,
            steps_per_s=steps / seconds,
            step_ms=1000 * seconds / steps if steps and new.num_running and old.num_running else None,
            rows_per_step=(new.num_scheduled_rows - old.num_scheduled_rows) / steps if steps else None,
            tokens_per_step=(new.num_scheduled_tokens - old.num_scheduled_tokens) / steps if steps else None,
            prefix_hit_rate=(new.prefix_cache_hits - old.prefix_cache_hits) / queries if queries else None,
            ttft_p50_s=None if ttft is None else ttft.quantile(0.5),
            ttft_p99_s=None if ttft is None else ttft.quantile(0.99),
            itl_p50_s=None if itl is None else itl.quantile(0.5),
            itl_p99_s=None if itl is None else itl.quantile(0.99),
        )


def _between(first: Metrics, last: Metrics, name: str) -> Histogram | None:
    """Return the values added between two answers; None if the engine does not measure."""
    new = last.histograms.get(name)
    if new is None:
        return None
    old = first.histograms.get(name, Histogram([], [0] * len(new.counts), 0.0))
    counts = [after - before for after, before in zip(new.counts, old.counts, strict=True)]
    return Histogram(new.bounds, counts, new.total - old.total)
