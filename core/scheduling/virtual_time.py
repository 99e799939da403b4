"""VirtualTime: the service that each client has received, in tokens divided by its weight.

This is the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). A client
that comes back after a pause is lifted to the least served active client, so a pause earns no credit.
"""

import numpy as np

from ipc.tables.arrays import Bools, Ints

#: Virtual time of one token at weight 1. Integers: sums are exact, and the same in every process.
TOKEN = 1 << 16

# From this many rows on, sorting them is cheaper. 8 rows: 0.8 us, sorted 8.5; 256: 9, sorted 11; 4,096: 130, sorted 49.
_MANY_ROWS = 512


class VirtualTime:
    """The virtual times of all clients as columns, indexed by a client's slot.

    Only clients with live requests count as present.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._times = np.zeros(16, np.int64)
        self._costs = np.full(16, TOKEN, np.int64)  # virtual time of one token
        self._num_present = np.zeros(16, np.int64)  # live requests
        self._lifted_to = np.full(16, -1, np.int64)  # the time to which the client was lifted at its last return
        self._latest = 0  # the least time of the present clients, or of those last present

    def of(self, client: int) -> int:
        """Return the virtual time of a client."""
        return int(self._times[self._slots[client]])

    def place(self, client: int) -> tuple[int, bool, int]:
        """Return a client's place among those that wait; the smallest is served first.

        Among equal virtual times, a client that was lifted and has received nothing since goes first. Otherwise it
        would have to wait for another step of the others.
        """
        slot = self._slots[client]
        time = int(self._times[slot])
        return time, time != int(self._lifted_to[slot]), client

    def behind(self, clients: Ints, client: int) -> Bools:
        """Return which of these clients have a later place than `client` among those that wait, bool [n]."""
        slots, slot = self._slots_of(clients), self._slots[client]
        lead = self._times[slots] - self._times[slot]
        has_had = (self._times[slots] != self._lifted_to[slots]).astype(np.int64)
        later = has_had - int(self._times[slot] != self._lifted_to[slot])
        is_behind: Bools = (lead > 0) | ((lead == 0) & ((later > 0) | ((later == 0) & (clients > client))))
        return is_behind

    def weights(self, clients: Ints) -> tuple[Ints, int]:
        """Return the weight of each of these clients, and the sum over all present ones, in units of 2**-16."""
        weights = TOKEN * TOKEN // self._costs
        return weights[self._slots_of(clients)], int(weights[self._num_present > 0].sum())

    def set_weight(self, client: int, weight: float) -> None:
        """Set a client's weight > 0: its share against clients of weight 1."""
        self._costs[self._slot(client)] = max(1, round(TOKEN / weight))

    def enter(self, client: int) -> int:
        """Count a new request of this client; return the client's slot."""
        slot = self._slot(client)
        if not self._num_present[slot]:
            present = self._times[self._num_present > 0]
            if len(present):
                self._latest = int(present.min())
            if self._times[slot] < self._latest:
                self._times[slot] = self._lifted_to[slot] = self._latest
        self._num_present[slot] += 1
        return slot

    def leave(self, client: int) -> None:
        """Count the end of one of the client's requests."""
        slot = self._slots[client]
        self._num_present[slot] -= 1
        if not self._num_present.any():
            self._latest = max(self._latest, int(self._times[slot]))

    def forget(self, client: int) -> None:
        """Remove a client that is gone. Its requests have already ended."""
        slot = self._slots.get(client)
        if slot is not None:
            assert not self._num_present[slot], f"client {client} has {self._num_present[slot]} requests"
            del self._slots[client]
            self._times[slot], self._costs[slot], self._lifted_to[slot] = 0, TOKEN, -1
            self._free.append(slot)

    def charge(self, clients: Ints, counts: Ints) -> None:
        """Charge counts[i] tokens to clients[i]. A client may occur many times."""
        tokens = np.bincount(self._slots_of(clients), counts, len(self._times)).astype(np.int64)
        self._times += tokens * self._costs

    def charge_one(self, client: int, count: int) -> None:
        """Charge `count` tokens to one client."""
        slot = self._slots[client]
        self._times[slot] += count * self._costs[slot]

    def at(self, clients: Ints) -> Ints:
        """Return the virtual time of each of these clients."""
        return self._times[self._slots_of(clients)]

    def _slots_of(self, clients: Ints) -> Ints:
        """Return the slots of these clients: one lookup per row, or per distinct client if there are many rows."""
        if len(clients) < _MANY_ROWS:
            return np.fromiter(map(self._slots.__getitem__, clients.tolist()), np.int64, len(clients))
        different, index = np.unique(clients, return_inverse=True)
        return np.array([self._slots[client] for client in different.tolist()], np.int64)[index]

    def _slot(self, client: int) -> int:
        slot = self._slots.get(client)
        if slot is None:
            if not self._free:
                size = len(self._slots)
                if size == len(self._times):
                    self._times = np.concatenate([self._times, np.zeros(size, np.int64)])
                    self._costs = np.concatenate([self._costs, np.full(size, TOKEN, np.int64)])
                    self._num_present = np.concatenate([self._num_present, np.zeros(size, np.int64)])
                    self._lifted_to = np.concatenate([self._lifted_to, np.full(size, -1, np.int64)])
                self._free.append(size)
            slot = self._slots[client] = self._free.pop()
        return slot
