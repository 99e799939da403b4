"""EarlyCopies: copies of waiting requests, made some steps before the snapshot that has them.

Thousands of requests may wait, and copying all of them between two steps would stop the engine for milliseconds. A
request keeps its ticket as long as it waits in one place, and there nothing is done to it but being overtaken. So a
copy is as good as new while both are what they were; a request of which that is not true is copied again. What else
changes together with the ticket, and is cheap to see, is compared, too.
"""

import operator
from collections.abc import Callable, Sequence
from itertools import compress
from typing import TypeAlias

from core.batch.request import Request
from core.scheduling.waiting_lines import Entry

#: A request, its copy, and how many of the hashes are in it: nothing but more of them is ever done to their list.
RequestNode: TypeAlias = tuple[Request, tuple[Request, int]]

_MOST = 128  # copies in one step: some 0.2 ms
_Marks: TypeAlias = tuple[int, int, int, bool]
_marks_of: Callable[[Request], _Marks] = operator.attrgetter("ticket", "num_overtaken", "awaits", "has_asked")
_copy_request: Callable[[Request], Request] = Request.__copy__  # type: ignore[attr-defined]


class EarlyCopies:
    """Copies of those requests that wait in the queue's lines. Only the engine thread uses this, between two steps.

    entries: of the lines.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._left = entries
        self._entries: list[Entry] = []  # whose requests were copied
        self._nodes: list[RequestNode] = []  # of each
        self._marks: list[_Marks] = []  # of each request when it was copied

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
                self._entries.append(entry)
                self._nodes.append((request, (_copy_request(request), len(request.block_hashes))))
                self._marks.append(_marks_of(request))

    def valid(self) -> tuple[list[Entry], list[RequestNode]]:
        """Return the entries whose requests are what they were when they were copied, and the nodes of these."""
        now = [_marks_of(request) for request, _ in self._nodes]
        if now == self._marks:
            return self._entries, self._nodes
        is_valid = list(map(operator.eq, now, self._marks))
        return list(compress(self._entries, is_valid)), list(compress(self._nodes, is_valid))
