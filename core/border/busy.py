"""Busy: which clients and tenants have unfinished requests. A client that is alone need not be held back for others."""

from itertools import islice

from core.border.sessions import Sessions

_LOOK_S = 0.05  # seconds between updates, because there may be thousands of sessions


class Busy:
    """Which clients and tenants have work, as of at most 50 ms ago. now: monotonic seconds, from the caller."""

    def __init__(self, sessions: Sessions, now: float) -> None:
        self._sessions = sessions
        self._next_look = now
        self._clients: list[int] = []  # at most two
        self._tenants: list[str] = []  # of requests that a client sent for a tenant; at most two

    def look(self, now: float) -> None:
        """Update who has work. Call this with the socket's lock held."""
        if now >= self._next_look:
            self._clients = list(islice((one.client for one in self._sessions.all if len(one.requests)), 2))
            self._tenants = list(islice(self._sessions.busy_tenants(), 2))
            self._next_look = now + _LOOK_S

    def others_than(self, client: int, tenant: str | None = None) -> bool:
        """Return whether another client or tenant has unfinished requests. May be called from any thread.

        tenant: "" = the client sends for itself; None: tenants do not count.
        """
        if any(one != client for one in self._clients):
            return True
        return tenant is not None and any(one != tenant for one in self._tenants)
