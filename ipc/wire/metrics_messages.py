"""Messages on measurements: the times of an engine's requests, as histograms, and the call for them.

They are part of the unions of ipc/wire/messages.py. Statistics has the counters of the scheduler; these are the
border's.
"""

from bisect import bisect_left

import msgspec

from ipc.wire.call import Call

#: Upper bounds of the buckets of Statistics.step_tokens, in tokens of a step; one more bucket is above them.
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram(msgspec.Struct, frozen=True, array_like=True):
    """Counts of values by size. A value equal to a bound is in the bucket of that bound."""

    bounds: list[float]  # upper bounds of the buckets, ascending
    counts: list[int]  # of each bucket, then of what is above the last bound
    total: float  # sum of all values

    def quantile(self, share: float) -> float | None:
        """Return the bound that this share of the values does not exceed; None without values.

        Values above the last bound count as that bound.
        """
        wanted, seen = share * sum(self.counts), 0
        if not wanted:
            return None
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if seen >= wanted:
                return bound
        return self.bounds[-1]


class GetMetrics(Call, frozen=True, array_like=True, tag=32):
    """Ask for the measurements of requests. Answered by Metrics at the border, without waiting for a step."""


class Metrics(msgspec.Struct, frozen=True, array_like=True, tag=90):
    """Measurements of all clients' requests since the engine started. Times are in seconds."""

    call: int
    is_measuring: bool  # the engine's option request_metrics; without it the fields below are empty
    histograms: dict[str, Histogram] = {}  # by vLLM's metric name, without its prefix
    num_finished: dict[str, int] = {}  # choices by finish reason: stop, length, abort, error
    num_refused: dict[str, int] = {}  # requests refused on arrival, by the name of the error code
    num_sessions: int = 0  # now


def step_token_bucket(num_tokens: int) -> int:
    """Return the index of the bucket in Statistics.step_tokens of a step with this many tokens."""
    return bisect_left(STEP_TOKEN_BOUNDS, num_tokens)
