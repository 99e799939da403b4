"""Latencies of recorded and replayed requests, as one table."""

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table


class Times(msgspec.Struct, frozen=True):
    """The times of one request, in seconds; None: the request did not get that far."""

    arrival: float
    first_token: float | None
    last_token: float | None
    finished: float | None  # None: aborted, failed or unfinished, so it has no end-to-end time
    num_tokens: int


class Summary(msgspec.Struct, frozen=True):
    """Milliseconds over `count` requests; percentiles are interpolated linearly between the two nearest values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Latencies(msgspec.Struct, frozen=True):
    """Three latencies over many requests; None: no request has such a time."""

    ttft_ms: Summary | None  # arrival to first token
    tpot_ms: Summary | None  # between tokens, mean of each request
    e2e_ms: Summary | None  # arrival to end, finished requests only


def latencies(times: Sequence[Times]) -> Latencies:
    """Return the summarized latencies of these requests."""
    return Latencies(
        ttft_ms=summarize([one.first_token - one.arrival for one in times if one.first_token is not None]),
        tpot_ms=summarize(
            [
                (one.last_token - one.first_token) / (one.num_tokens - 1)
                for one in times
                if one.first_token is not None and one.last_token is not None and one.num_tokens > 1
            ]
        ),
        e2e_ms=summarize([one.finished - one.arrival for one in times if one.finished is not None]),
    )


def summarize(seconds: Sequence[float]) -> Summary | None:
    """Return the summary of values in seconds, in milliseconds; None for no values."""
    if not seconds:
        return None
    values = [sum(seconds) / len(seconds), *(percentile(seconds, q) for q in (0.5, 0.9, 0.99)), max(seconds)]
    return Summary(len(seconds), *(round(value * 1000, 3) for value in values))


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile (q from 0 to 1), linear between the two nearest values."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * q
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def print_latencies(console: Console, recorded: Latencies, replayed: Latencies, lateness: Summary | None) -> None:
    """Print recorded and replayed latencies as one table. lateness: of sending, in milliseconds."""
    table = Table(title="milliseconds", title_justify="left")
    table.add_column("")
    for name in ("requests", "mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for name in Latencies.__struct_fields__:
        label = name.removesuffix("_ms").upper()
        _add(table, f"{label} recorded", getattr(recorded, name))
        _add(table, f"{label} replayed", getattr(replayed, name))
    _add(table, "sent late", lateness)
    console.print(table)


def _add(table: Table, label: str, summary: Summary | None) -> None:
    if summary is None:
        table.add_row(label, "0", *["-"] * 5)
    else:
        values = (summary.mean, summary.p50, summary.p90, summary.p99, summary.max)
        table.add_row(label, str(summary.count), *(f"{value:.2f}" for value in values))
