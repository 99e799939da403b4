"""Suspects: which requests ran at replicas that died, and which of them kills replicas.

A replica's death does not show its cause. But a request's computation does not depend on its neighbours, so one that
kills its replica does so at the same position of its output wherever it runs. A request becomes a suspect if its
replica dies while it runs, and is cleared as soon as it gets past that position elsewhere. If a replica dies that runs
exactly one suspect, that is the one: two replicas have died at its same position. If the replica runs several suspects,
each of them runs apart from the others from then on, so that the next death identifies it.
"""

import msgspec

from frontend.fleet.requests import RoutedRequests

#: Tokens beyond the last known ones that a dead replica may have computed: unsent tokens, or those in transit.
MARGIN = 64


class _Case(msgspec.Struct):
    """The suspicion against one request."""

    length: int  # its output when its replica died: number of tokens of all choices
    replicas: list[str]  # that died while it ran, at the same position
    is_alone: bool = False  # it runs apart from other suspects


class Suspects:
    """The suspects, by the rows of their first choices."""

    def __init__(self) -> None:
        self._cases: dict[int, _Case] = {}

    def __len__(self) -> int:
        return len(self._cases)

    def note_death(self, address: str, rows: list[int], requests: RoutedRequests) -> tuple[int, list[str]] | None:
        """Note that a replica died while these requests ran there.

        Return the row of the request that has killed this replica and earlier ones, with their addresses; None if
        unknown.
        """
        self.note_progress(requests)
        repeated = [row for row in rows if row in self._cases]
        named = repeated if len(repeated) == 1 else [row for row in repeated if self._cases[row].is_alone]
        if len(named) == 1:
            return named[0], [*self._cases.pop(named[0]).replicas, address]
        for row in rows:
            case = self._cases.setdefault(row, _Case(requests.num_output(row), []))
            case.is_alone = bool(case.replicas)
            case.replicas.append(address)
        return None

    def note_progress(self, requests: RoutedRequests) -> None:
        """Clear the requests that are past the position at which their replica died."""
        for row, case in list(self._cases.items()):
            if requests.num_output(row) > case.length + MARGIN:
                del self._cases[row]

    def must_be_alone(self, row: int) -> bool:
        """Return whether a request must run apart from other suspects."""
        case = self._cases.get(row)
        return case is not None and case.is_alone

    def replicas_with_one(self, requests: RoutedRequests) -> frozenset[int]:
        """Return the replicas that have a suspect that runs apart."""
        return frozenset(int(requests.replica[row]) for row, case in self._cases.items() if case.is_alone)

    def clear(self, row: int) -> None:
        """Remove a request that has ended."""
        self._cases.pop(row, None)
