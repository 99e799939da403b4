"""AdapterSlots: the limit of max_loras different adapters in a batch."""

from collections.abc import Callable

from core.batch.request import Request
from core.batch.table import RequestStart
from core.scheduling.decisions import Examined, Verdict
from core.scheduling.draft import Draft


class AdapterSlots:
    """A limit on the number of adapters in a batch.

    Running requests with the same adapter share a slot; those without one need none. A request that finds no free slot
    lets at most `admission_lookahead` others pass, so it cannot starve.
    """

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._num_running: dict[str, int] = {}  # by digest: number of requests that have a row or start in this step

    def rename(self, word: Callable[[str], str]) -> None:
        """Rename the adapters' digests."""
        self._num_running = {word(digest): count for digest, count in self._num_running.items()}

    def lacks(self, start: RequestStart, draft: Draft) -> Examined | None:
        """Return NO_ADAPTER if the request's adapter has no slot and none is free, otherwise None."""
        adapter = start.request.adapter
        if adapter is None or adapter.digest in self._num_running or len(self._num_running) < self._max_loras:
            return None
        return Examined(start.request, Verdict.NO_ADAPTER, 1, 0)

    def take(self, start: RequestStart, draft: Draft) -> None:
        """Count the request."""
        if (adapter := start.request.adapter) is not None:
            self._num_running[adapter.digest] = self._num_running.get(adapter.digest, 0) + 1

    def give_back(self, request: Request) -> None:
        """Stop counting the request. The last request of an adapter frees its slot."""
        if (adapter := request.adapter) is None:
            return
        self._num_running[adapter.digest] -= 1
        if not self._num_running[adapter.digest]:
            del self._num_running[adapter.digest]
