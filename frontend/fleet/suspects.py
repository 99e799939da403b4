"""Suspects: which requests ran at replicas that died, and which of them is the one that kills replicas.

A replica's death says nothing of why. But a request's computation does not depend on its neighbours, so one that kills
its replica does so at the same place of its output wherever it runs. Hence a request is under suspicion when its
replica dies while it runs, and cleared as soon as it gets past that place elsewhere. When a replica dies that runs
exactly one request under suspicion, that is the one: two replicas have died at the same place of it. Where there are
several, each of them runs apart from the others from then on, so that the next death names it.
"""

import msgspec

from frontend.fleet.requests import RoutedRequests

#: Tokens beyond the last known ones that a dead replica may have computed: what it had not sent, or was on its way.
MARGIN = 64


class _Case(msgspec.Struct):
    """The suspicion against one request."""

    length: int  # its output when its replica died: tokens of all choices
    replicas: list[str]  # that died while it ran, at the same place
    is_alone: bool = False  # it runs apart from other suspects


class Suspects:
    """The requests under suspicion, by the rows of their first choices."""

    def __init__(self) -> None:
        self._cases: dict[int, _Case] = {}

    def __len__(self) -> int:
        return len(self._cases)

    def note_death(self, address: str, rows: list[int], requests: RoutedRequests) -> tuple[int, list[str]] | None:
        """Note that a replica died while these requests ran there.

        Return the row of the request that has killed it and the replicas before it, with their addresses; None where
        that is not known.
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
        """Clear the requests that have got past the place where their replica died."""
        for row, case in list(self._cases.items()):
            if requests.num_output(row) > case.length + MARGIN:
                del self._cases[row]

    def must_be_alone(self, row: int) -> bool:
        """Return whether a request has to run apart from other suspects."""
        case = self._cases.get(row)
        return case is not None and case.is_alone

    def replicas_with_one(self, requests: RoutedRequests) -> frozenset[int]:
        """Return the replicas at which a suspect is placed that runs apart."""
        return frozenset(int(requests.replica[row]) for row, case in self._cases.items() if case.is_alone)

    def clear(self, row: int) -> None:
        """Forget a request that has ended."""
        self._cases.pop(row, None)
