"""Busy: which clients and tenants have unfinished requests, so that who is alone need not be held back for others."""

from itertools import islice

from core.border.sessions import Sessions

_LOOK_S = 0.05  # between looks: there may be thousands of sessions


class Busy:
    """Who has work, as it was at most 50 ms ago. now: monotonic seconds, of the caller."""

    def __init__(self, sessions: Sessions, now: float) -> None:
        self._sessions = sessions
        self._next_look = now
        self._clients: list[int] = []  # two at most
        self._tenants: list[str] = []  # of requests that a client sent for somebody; two at most

    def look(self, now: float) -> None:
        """See who has work now, for the thread that holds the socket's lock."""
        if now >= self._next_look:
            self._clients = list(islice((one.client for one in self._sessions.all if len(one.requests)), 2))
            self._tenants = list(islice(self._sessions.busy_tenants(), 2))
            self._next_look = now + _LOOK_S

    def others_than(self, client: int, tenant: str | None = None) -> bool:
        """Return whether another client has unfinished requests, or another tenant; for any thread.

        tenant: "" = the client sends for itself; None: tenants do not count.
        """
        if any(one != client for one in self._clients):
            return True
        return tenant is not None and any(one != tenant for one in self._tenants)
