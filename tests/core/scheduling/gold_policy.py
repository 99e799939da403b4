"""The scheduling policies once more, plain and slow: who goes first, who makes room for whom."""

from ipc.options.config import EngineConfig
from tests.core.scheduling.gold_entry import Entry


class GoldPolicy:
    """fcfs: as they come. priority: by class, or by arrival + priority * aging. fair: parties by tokens served."""

    def __init__(self, config: EngineConfig) -> None:
        self.name, self.quantum = config.scheduling_policy, config.fair_quantum * 65536
        self.aging = round(config.priority_aging_seconds * 10**9)
        self.weights: dict[int, float] = {}
        self.times: dict[int, int] = {}  # of each party: 65536 for a token, divided by its weight
        self.latest = 0
        self.lifted: dict[int, int] = {}  # to which time a party was lifted when it came last
        self.num_rows = config.max_num_seqs

    def join(self, q: Entry, live: list[Entry]) -> None:
        q.priority = q.rank = 0 if self.name == "fcfs" else q.priority
        if self.name == "priority":
            q.urgency = (q.priority < 0) - (q.priority > 0)
            q.rank = q.arrival + q.priority * self.aging if self.aging else q.priority
        present = {other.party for other in live}
        if q.party not in present:  # who was away has saved nothing up
            self.latest = min((self.times[client] for client in present), default=self.latest)
            if self.times.setdefault(q.party, 0) < self.latest:
                self.times[q.party] = self.lifted[q.party] = self.latest

    def leave(self, last: Entry) -> None:
        """Nobody is left."""
        self.latest = max(self.latest, self.times[last.party])

    def charge(self, rows: list[Entry]) -> None:
        """Charge the rows for their tokens of this step."""
        for r in rows:
            new = min(r.n, max(0, r.computed + r.n - r.served))  # what is computed again is free
            self.times[r.party] += new * self.cost(r.party)

    def cost(self, party: int) -> int:
        return max(1, round(65536 / self.weights.get(party, 1)))

    def turn(self, r: Entry) -> tuple[int, int]:
        return (self.times[r.party], r.party) if self.name == "fair" else (0, 0)

    def place(self, r: Entry) -> tuple[int, ...]:
        """The smallest is served first."""
        return (*self.turn(r), r.rank, r.serial)

    def queue(self, q: Entry) -> tuple[int, ...]:
        """The smallest starts first; of equals, a party that has had nothing since it was lifted."""
        if self.name != "fair":
            return (q.rank, q.serial)
        time = self.times[q.party]
        return (time, time != self.lifted.get(q.party), q.party, q.rank, q.serial)

    def value(self, r: Entry) -> tuple[int, ...]:
        """The smallest is the first victim."""
        time, client = self.turn(r)
        return (-time, -client, -r.priority)

    def must_yield(self, r: Entry, q: Entry, rows: list[Entry], live: list[Entry]) -> bool:
        """Whether r, one of the rows that run, makes room for q, which waits."""
        if self.name == "fair" and r.party != q.party:
            lead = self.times[r.party] - self.times[q.party]
            own = [other for other in rows if other.party == q.party]
            his = sorted([other for other in rows if other.party == r.party], key=lambda r: (r.rank, r.serial))
            may_ask = self.queue(q)[:3] < self.queue(r)[:3] and len(own) < self.due(q.party, live)
            return lead > self.quantum or (may_ask and his.index(r) >= self.due(r.party, live))
        return r.priority > q.priority and (self.name == "fair" or r.rank > q.rank)

    def due(self, party: int, live: list[Entry]) -> int:
        """Rows of the batch that are due to a party: one at least."""
        total = sum(2**32 // self.cost(other) for other in {q.party for q in live})
        return max(1, self.num_rows * (2**32 // self.cost(party)) // total)
