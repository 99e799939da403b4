"""Alternatives: addresses of engines or routers, any of which can serve a client; after a loss, the next one is used"""

import time
from collections.abc import Sequence

from ipc.errors import EngineDeadError
from ipc.wire.sockets import check_address, check_listening

#: Seconds in which an address must answer before the next one is tried.
_TURN_S = 0.5


class Alternatives:
    """The `locate` of a ZmqTransport. first: the address to begin with. Errors: AddressError; EngineDeadError if
    nothing listens at any of them.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            check_address(address, binding=False)
        self._addresses = list(addresses)
        self._at = self._first()
        self._since = 0.0  # monotonic; when this address became the current one
        self.first = self._addresses[self._at]

    def _first(self) -> int:
        reasons = []
        for at, address in enumerate(self._addresses):
            try:
                check_listening(address)
            except EngineDeadError as error:
                reasons.append(str(error))
            else:
                return at
        raise EngineDeadError("; ".join(reasons))

    def __call__(self) -> str:
        """Return the address to try now."""
        now = time.monotonic()
        if now - self._since > _TURN_S:
            self._since = now
            self._at = (self._at + 1) % len(self._addresses)
        return self._addresses[self._at]
