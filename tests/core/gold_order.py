"""The scheduling policies once more, plain and slow: who goes first, who makes room for whom."""

from ipc.config import EngineConfig
from tests.core.gold_blocks import Entry, GoldBlocks


class GoldOrder:
    def __init__(self, config: EngineConfig) -> None:
        self.c = config
        self.b = GoldBlocks(
            config.num_blocks_override or 0,
            config.block_size,
            config.enable_prefix_caching,
            config.scheduling_policy == "priority",
        )
        self.weights: dict[int, float] = {}
        self.times: dict[int, int] = {}  # of fair: tokens served, divided by weight
        self.latest, self.latency, self.began, self.step = 0, 0, -1, 0
        self.limit, self.tokens = config.max_num_seqs, config.max_num_batched_tokens  # 0 while all is paused
        self.shut = False  # nothing begins
        self.slots = config.num_swap_blocks or 0
        self.running: list[Entry] = []
        self.waiting: list[Entry] = []
        self.in_flight: list[tuple[int, list[tuple[Entry, int, bool]]]] = []

    def up(self, tokens: int) -> int:
        return -(-tokens // self.b.size)

    def add(self, q: Entry) -> bool:
        if self.up(q.max_total - 1) > (self.c.num_blocks_override or 0) - 1:
            return False
        if not self.c.enable_chunked_prefill and q.max_total - 1 > self.c.max_num_batched_tokens:
            return False
        q.priority = 0 if self.c.scheduling_policy == "fcfs" else q.priority
        q.rank = q.priority
        if self.c.scheduling_policy == "priority" and (aging := round(self.c.priority_aging_seconds * 10**9)):
            q.rank = q.arrival + q.priority * aging
        present = {live.client for live in self.running + self.waiting}
        if q.client not in present:
            self.latest = min((self.times[client] for client in present), default=self.latest)
            self.times[q.client] = max(self.times.get(q.client, 0), self.latest)
        self.waiting.append(q)
        return True

    def end(self, q: Entry) -> None:
        self.slots += q.slots
        (self.running if q in self.running else self.waiting).remove(q)
        self.b.release(q, self.in_flight[-1][0] if self.in_flight else None)
        if not self.running + self.waiting:
            self.latest = max(self.latest, self.times[q.client])

    def charge(self, q: Entry, end: int, count: int) -> None:
        new = min(count, max(0, end - q.served))  # what is computed again is free
        self.times[q.client] += new * max(1, round(65536 / self.weights.get(q.client, 1)))

    def place(self, q: Entry) -> tuple[int, ...]:
        first = (self.times[q.client], q.client) if self.c.scheduling_policy == "fair" else ()
        return (*first, q.rank, q.serial)

    def must_yield(self, q: Entry, r: Entry) -> bool:
        if self.c.scheduling_policy == "fair" and r.client != q.client:
            return self.times[r.client] > self.times[q.client] + self.c.fair_quantum * 65536
        later = self.c.scheduling_policy == "fair" or (r.rank, r.serial) > (q.rank, q.serial)
        return r.priority > q.priority and later

    def victims(self, rows: list[Entry]) -> list[Entry]:
        def key(r: Entry) -> tuple[int, ...]:
            again = r.computed * (self.c.recompute_ns_per_token or 1)
            copied = self.up(r.computed) * 2 * (self.c.swap_ns_per_block or 1)
            cost = {"recompute": again, "swap": copied, "auto": min(again, copied)}[self.c.preemption_mode]
            client = (-self.times[r.client], -r.client) if self.c.scheduling_policy == "fair" else ()
            return (*client, -r.priority, cost, -rows.index(r))

        return sorted(rows, key=key)
