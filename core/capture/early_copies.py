"""EarlyCopies: copies of waiting requests, made some steps before the snapshot that has them.

Thousands of requests may wait, and copying all of them between two steps would stop the engine for milliseconds. A
request keeps its ticket as long as it waits in one place, and there nothing is done to it but being overtaken. So a
copy is as good as new while both are what they were; a request of which that is not true is copied again. What else
changes together with the ticket, and is cheap to see, is compared, too.
"""

import operator
from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple, TypeAlias

from core.batch.request import Request
from core.scheduling.waiting_lines import Entry

#: A request, its copy, and how many of the hashes are in it: nothing but more of them is ever done to their list.
RequestNode: TypeAlias = tuple[Request, tuple[Request, int]]

_MOST = 128  # copies in one step: some 0.2 ms
_Marks: TypeAlias = tuple[int, int, int, bool]
_marks_of: Callable[[Request], _Marks] = operator.attrgetter("ticket", "num_overtaken", "awaits", "has_asked")
_copy_request: Callable[[Request], Request] = Request.__copy__  # type: ignore[attr-defined]


class ValidCopies(NamedTuple):
    """Copies that are as good as new ones. Objects are known by their ids; those in `nodes` keep them alive."""

    known: set[int]  # of these requests and of their entries
    nodes: list[RequestNode]
    places: dict[int, int]  # in nodes, of the requests


class EarlyCopies:
    """Copies of those requests that wait in the queue's lines. Only the engine thread uses this, between two steps.

    entries: of the lines.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._left = entries
        self._entries: list[Entry] = []  # whose requests were copied
        self._requests: list[Request] = []  # of each
        self._nodes: list[RequestNode] = []
        self._marks: list[_Marks] = []  # when it was copied
        self._known: set[int] = set()  # as in ValidCopies, like the next one
        self._places: dict[int, int] = {}

    @property
    def is_done(self) -> bool:
        """Return whether all requests were copied."""
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
        """Return the copies of requests that are what they were when they were copied. This is for one snapshot."""
        now = list(map(_marks_of, self._requests))
        if now == self._marks:
            return ValidCopies(self._known, self._nodes, self._places)
        is_valid = list(map(operator.eq, now, self._marks))
        nodes, entries = list(compress(self._nodes, is_valid)), compress(self._entries, is_valid)
        places = {id(request): place for place, (request, _) in enumerate(nodes)}
        return ValidCopies({*map(id, entries), *places}, nodes, places)
