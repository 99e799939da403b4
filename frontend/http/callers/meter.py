"""HttpMeter: an HTTP server's counts of its requests, for its metrics and the access log."""

import logging
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import msgspec

#: Upper bounds of the buckets of durations, in seconds.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_MAX_NAMES = 100  # most unknown fields that are named in the log
_MAX_NAME_CHARS = 64
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_log = logging.getLogger("engine_core.http")


class Durations(msgspec.Struct):
    """Requests of one route, method and class of status: counts by bucket, the last one without a bound; seconds."""

    counts: list[int]
    total_s: float = 0.0


class HttpMeter:
    """The counters of one server. Used in the event loop; a scrape reads them from another thread."""

    def __init__(self) -> None:
        self.num_unknown_fields = 0
        self._named: set[str] = set()
        self._left_out: set[str] = set()
        self._durations: dict[tuple[str, str, str], Durations] = {}

    def count(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request. route: its row's path; "" for a path without a row."""
        key = (route or "none", method, f"{status // 100}xx")
        found = self._durations.get(key)
        if found is None:
            found = self._durations[key] = Durations([0] * (len(BUCKETS) + 1))
        found.counts[bisect_left(BUCKETS, seconds)] += 1
        found.total_s += seconds

    def count_fields(self, body: bytes, known: tuple[str, ...]) -> None:
        """Count the fields of a JSON object that its type does not have. Each name is logged once."""
        names = _fields_decoder.decode(body).keys() - known
        if not names:
            return
        self.num_unknown_fields += len(names)
        for name in sorted(names - self._named)[: _MAX_NAMES - len(self._named)]:
            self._named.add(name)
            _log.warning("the field %.*r is unknown here and has no effect", _MAX_NAME_CHARS, name)

    def note_left_out(self, what: str) -> None:
        """Log parts of requests that are left out, with the reason. Each is logged once."""
        if what not in self._left_out and len(self._left_out) < _MAX_NAMES:
            self._left_out.add(what)
            _log.warning("left out of requests: %s", what)

    def durations(self) -> Iterator[tuple[tuple[str, str, str], Durations]]:
        """Yield ((route, method, class of status), durations)."""
        yield from list(self._durations.items())


def known_fields(decoder: "msgspec.json.Decoder[Any]") -> tuple[str, ...]:
    """Return the names of the fields of a decoder's type."""
    return tuple(decoder.type.__struct_encode_fields__)
