"""The scheduler once more: slow, of plain lists, dicts and sorted(). Tests compare each step's decisions with it."""

from collections.abc import Callable
from typing import Any

from tests.core.gold_admission import GoldAdmission
from tests.core.gold_blocks import Entry


class Gold(GoldAdmission):
    def schedule(self, now: int) -> dict[str, Any]:
        self.now, self.budget, self.skipped, self.settled = now, self.tokens, 0, 0
        self.ran, self.starts, self.preempted, self.refused = [], [], [], []
        if self.c.enable_chunked_prefill:
            self.grow()
        self.admit()
        if not self.c.enable_chunked_prefill and not self.starts:
            self.grow()
        return self.commit()

    def demand(self, rows: list[Entry], num_growing: int = 10**9) -> list[tuple[Entry, int, int]]:
        """(row, tokens, blocks that it lacks for them)"""
        left, result, most = self.budget, [], self.c.long_prefill_token_threshold
        for index, r in enumerate(rows):
            known = len(r.tokens) + r.pending
            n = 0 if r.pending and known >= r.max_total else known - r.computed
            n = min(n, left, most if most and len(rows) + len(self.waiting) > 1 else n)
            n = min(n, len(r.blocks) * self.b.size - r.computed) if index >= num_growing else n
            left -= n
            result.append((r, n, max(0, self.up(r.computed + n) - len(r.blocks))))
        return result

    def first_short(self, served: list[tuple[Entry, int, int]]) -> int:
        return next(i for i in range(len(served)) if sum(s[2] for s in served[: i + 1]) > self.b.free)

    def grow(self) -> None:
        served = self.demand(sorted(self.running, key=lambda r: (r.rank, r.serial)))
        if sum(need for _, _, need in served) > self.b.free or sum(n for _, n, _ in served) == self.budget:
            served = self.demand(sorted(self.running, key=self.place))
        while sum(need for _, _, need in served) > self.b.free + len(self.b.fenced):
            short = self.first_short(served)
            later = [r for r, _, _ in served[short + 1 :]]
            level = served[short][0].priority
            victims = [r for r in later if r.priority != level or len(r.blocks) < self.up(r.max_total - 1)]
            if not victims:
                break
            self.preempt(victim := self.victims(victims)[0], 1)
            served = self.demand([r for r, _, _ in served if r is not victim])
        if sum(need for _, _, need in served) > self.b.free:
            wanted = served
            served = self.demand([r for r, _, _ in served], self.first_short(served))
            self.skipped += sum(before[1] > 0 and not now[1] for before, now in zip(wanted, served, strict=True))
        for r, n, need in served:
            self.ran.append((r, n))
            r.blocks += self.b.allocate(need)
        self.budget -= sum(n for _, n in self.ran)

    def commit(self) -> dict[str, Any]:
        batch = [(r, n) for r, n in self.ran if n]
        for r, n in batch:
            self.charge(r, r.computed + n, n)
        for q, computed, count, _ in self.starts:
            self.running.append(q)
            q.computed = computed
            batch.append((q, count))
            self.slots, q.slots, q.kept = self.slots + q.slots, 0, 0
        entries = []
        for r, n in batch:
            r.computed += n
            samples = r.computed == len(r.tokens) + r.pending
            r.pending += samples
            entries.append((r, r.stay, samples))
        full = [(min(r.computed, len(r.tokens)) // self.b.size, r) for r, _ in batch]
        for count, r in sorted(full, key=lambda pair: pair[0] - pair[1].named > 1):  # one block each first, as columns
            self.b.name(r, count)
        if batch:
            self.in_flight.append((self.step, entries))
            self.step += 1
        return {
            "batch": [(r.number, n) for r, n in batch],
            "started": [(q.number, computed) for q, computed, _, _ in self.starts],
            "preempted": [(r.number, cause, slots) for r, cause, slots in self.preempted],
            "refused": self.refused,
            "left": (self.budget, self.b.free, len(self.b.fenced), self.slots, len(self.waiting), self.skipped),
        }

    def update(self, token: Callable[[int, int], int]) -> list[int]:
        """token: of (request, position). Returns who has ended."""
        step, entries = self.in_flight.pop(0)
        self.b.lift(step)
        live = [r for r, stay, samples in entries if samples and r.stay == stay]
        for r in live:
            r.tokens.append(token(r.number, len(r.tokens)))
            r.pending -= 1
        ended = [r for r in live if r.tokens[-1] == r.eos or len(r.tokens) == r.max_total]
        for r in ended:
            self.end(r)
        return [r.number for r in ended]
