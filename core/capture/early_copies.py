"""EarlyCopies: copies of waiting requests, made some steps before the snapshot that contains them.

Thousands of requests may wait, and copying all of them between two steps would stop the engine for milliseconds. A
request keeps its ticket as long as it waits in one place, and during that time it is only overtaken. So a copy is valid
as long as the ticket and the count of overtaking requests are the same; otherwise the request is copied again. Other
fields that change together with the ticket and are cheap to compare are compared too.
"""

import operator
from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple, TypeAlias

from core.batch.request import Request
from core.scheduling.waiting_lines import Entry

#: A request, its copy, and the number of hashes in it: the list of hashes only ever grows.
RequestNode: TypeAlias = tuple[Request, tuple[Request, int]]

_MOST = 128  # copies per step: about 0.2 ms
_Marks: TypeAlias = tuple[int, int, int, bool]
_marks_of: Callable[[Request], _Marks] = operator.attrgetter("ticket", "num_overtaken", "awaits", "has_asked")
_copy_request: Callable[[Request], Request] = Request.__copy__  # type: ignore[attr-defined]


class ValidCopies(NamedTuple):
    """Copies that are still valid. Objects are identified by id(); those in `nodes` keep them alive."""

    known: set[int]  # ids of these requests and of their entries
    nodes: list[RequestNode]
    places: dict[int, int]  # index in nodes of each request


class EarlyCopies:
    """Copies of requests that wait in the queue's lines. Only the engine thread uses this, between two steps.

    entries: returns the lines' entries.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._left = entries
        self._entries: list[Entry] = []  # entries whose requests were copied
        self._requests: list[Request] = []  # the request of each
        self._nodes: list[RequestNode] = []
        self._marks: list[_Marks] = []  # state of each when it was copied
        self._known: set[int] = set()  # as in ValidCopies, like the next one
        self._places: dict[int, int] = {}

    @property
    def is_done(self) -> bool:
        """Return whether all requests have been copied."""
        return not self._left

    def copy_some(self) -> None:
        """Copy the next requests."""
        some, self._left = self._left[:_MOST], self._left[_MOST:]
        for entry in some:
            _, _, ticket, request = entry
            if ticket == request.ticket and not request.choices and request.swapped is None:
                self._known.update((id(entry), id(request)))
                self._places[id(request)] = len(self._nodes)
                self._entries.append(entry)
                self._requests.append(request)
                self._nodes.append((request, (_copy_request(request), len(request.block_hashes))))
                self._marks.append(_marks_of(request))

    def valid(self) -> ValidCopies:
        """Return the copies of requests that have not changed since they were copied. For one snapshot."""
        now = list(map(_marks_of, self._requests))
        if now == self._marks:
            return ValidCopies(self._known, self._nodes, self._places)
        is_valid = list(map(operator.eq, now, self._marks))
        nodes, entries = list(compress(self._nodes, is_valid)), compress(self._entries, is_valid)
        places = {id(request): place for place, (request, _) in enumerate(nodes)}
        return ValidCopies({*map(id, entries), *places}, nodes, places)
