"""Parties: the numbers of those that share the engine under policy fair: clients, and tenants that clients name."""

from collections import OrderedDict
from collections.abc import Callable, Mapping

from core.batch.request import Request
from core.scheduling.policies import Policy

#: Number of idle tenants whose share is remembered. A forgotten tenant comes back as a new one and starts level with
#: the least served active party.
MAX_IDLE = 1024


class Parties:
    """Tenants by name: their numbers, which are negative, and how many live requests each has.

    A client's own requests use the client's number, and cost nothing here. weights: shares by name.
    """

    def __init__(self, policy: Policy, weights: Mapping[str, float]) -> None:
        self._policy = policy
        self._weights = weights
        self._numbers: dict[str, int] = {}
        self._num_live: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # ordered by idle time, longest first
        self._num_named = 0

    def enter(self, request: Request) -> None:
        """Count a new request of a tenant, and set its party."""
        tenant = request.tenant
        number = self._numbers.get(tenant)
        if number is None:
            self._num_named += 1
            number = self._numbers[tenant] = -self._num_named
            if tenant in self._weights:
                self._policy.set_weight(number, self._weights[tenant])
        self._idle.pop(tenant, None)
        self._num_live[tenant] = self._num_live.get(tenant, 0) + 1
        request.party = number

    def rename(self, word: Callable[[str], str], weights: Mapping[str, float]) -> None:
        """Rename the tenants, and set their weights under the new names."""
        self._weights = weights
        self._numbers = {word(name): number for name, number in self._numbers.items()}
        self._num_live = {word(name): count for name, count in self._num_live.items()}
        self._idle = OrderedDict((word(name), None) for name in self._idle)

    def leave(self, request: Request) -> None:
        """Count the end of a tenant's request."""
        tenant = request.tenant
        self._num_live[tenant] -= 1
        if not self._num_live[tenant]:
            del self._num_live[tenant]
            self._idle[tenant] = None
            if len(self._idle) > MAX_IDLE:
                forgotten, _ = self._idle.popitem(last=False)
                self._policy.forget(self._numbers.pop(forgotten))
