"""Preemption and admission once more, plain and slow: which waiting requests start, and on whose room."""

from tests.core.gold_blocks import Block, Entry
from tests.core.gold_order import GoldOrder


class GoldAdmission(GoldOrder):
    """What is known of the step being planned; see Gold.schedule()."""

    now: int
    budget: int
    skipped: int  # rows that wanted tokens and get none
    settled: int  # of the starts: have their blocks
    ran: list[tuple[Entry, int]]  # running rows and their tokens
    starts: list[tuple[Entry, int, int, int]]  # request, computed before, tokens, new blocks
    preempted: list[tuple[Entry, int, int]]  # request, cause, blocks on the host
    refused: list[tuple[int, str]]

    def preempt(self, r: Entry, cause: int) -> None:
        kept = min(r.computed, len(r.tokens) - 1)
        count = self.up(kept)
        cheap = count * 2 * (self.c.swap_ns_per_block or 1) < kept * (self.c.recompute_ns_per_token or 1)
        if 0 < count <= self.slots and (self.c.preemption_mode == "swap" or cheap):
            r.slots, r.kept = count, kept
            self.slots -= count
        self.preempted.append((r, cause, r.slots))
        self.budget += sum(n for other, n in self.ran if other is r)
        self.ran = [(other, n) for other, n in self.ran if other is not r]
        r.preemptions += cause == 1
        r.served = max(r.served, r.computed)
        self.running.remove(r)
        self.b.release(r, self.in_flight[-1][0] if self.in_flight else None)
        self.waiting.append(r)

    def promised(self, r: Entry) -> int:
        return max(0, self.up(len(r.tokens)) - len(r.blocks))

    def first(self) -> Entry | None:
        return min((q for q in self.waiting if q.begun or not self.shut), key=self.place, default=None)

    def admit(self) -> None:
        if self.began >= 0:
            self.latency, self.began = self.now - self.began, -1
        first = self.first()
        if first is None:
            return
        if self.running and self.now - first.arrival < self.c.scheduler_delay_factor * self.latency:
            return
        is_full = not self.budget or len(self.running) >= self.limit
        if is_full and not any(self.must_yield(first, r) for r in self.running):
            self.refused.append((first.number, "NO_ROW" if self.budget else "NO_BUDGET"))
            return
        self.room = self.limit - len(self.running)
        self.reserved = sum(self.promised(r) for r in self.running)
        self.partial = 0  # of those that start
        kept: list[Entry] = []
        passed: Entry | None = None
        while q := self.first():
            self.waiting.remove(q)
            if refusal := self.attempt(q):
                kept.append(q)
                self.refused.append((q.number, refusal))
                passed = passed or q
                if refusal not in ("NO_BLOCKS", "PARTIAL_PREFILLS") or len(kept) > self.c.admission_lookahead:
                    break
            elif passed:
                passed.overtaken += 1
            if passed and passed.overtaken >= self.c.admission_lookahead:
                break
        self.waiting += kept
        self.settle()
        self.began = self.now if self.starts else -1

    def left(self, q: Entry, hits: list[Block], blocks: int) -> int:
        margin = 0
        if self.running or self.starts:
            margin = int(self.c.watermark * (self.c.num_blocks_override or 0))
            margin += min(2**q.preemptions - 1, self.up(q.max_total - 1) - blocks)
        unsettled = sum(new for _, _, _, new in self.starts[self.settled :])
        return self.b.free - sum(block in self.b.cached for block in hits) - self.reserved - unsettled - margin

    def attempt(self, q: Entry) -> str:
        """Start it: "", or say what it lacks."""
        if any(q is victim for victim, _, _ in self.preempted):
            return "PREEMPTED"
        begin = (q.salt, q.tokens[: self.b.size])
        starts = self.starts[self.settled :] if len(q.tokens) >= self.b.size else []
        if any(begin == (s[0].salt, s[0].tokens[: self.b.size]) for s in starts):
            self.settle()
        hits, content = self.b.find(q)
        computed = max(len(hits) * self.b.size, q.kept)
        missing = want = len(q.tokens) - computed
        if self.running or self.waiting or self.starts:
            want = min(want, self.c.long_prefill_token_threshold or self.c.max_num_batched_tokens)
        reserve = self.c.reserve_full_length or q.preemptions >= 8
        blocks = self.up(q.max_total - 1 if reserve else len(q.tokens))
        lack = blocks - len(hits) - self.left(q, hits, blocks)
        budget, yields, victims = self.budget, list[Entry](), 0
        if lack > 0 or self.room < 1 or budget < want:
            order = sorted(self.running, key=lambda r: (r.rank, r.serial))
            yields, given = self.victims([r for r in order if self.must_yield(q, r)]), 0
            while victims < len(yields) and (victims + self.room < 1 or given < lack):
                victims, given = victims + 1, given + self.promised(yields[victims])
                for block in yields[victims - 1].blocks:  # it goes with the last of its owners
                    owners = sum(block in r.blocks for r in yields[:victims])
                    given += owners == block.owners and block not in hits
            if given < lack:
                return "NO_BLOCKS"
            if victims + self.room < 1:
                return "NO_ROW"
            budget += sum(n for r, n in self.ran if r in yields)
        count = min(want, budget)
        if count < (1 if self.c.enable_chunked_prefill else missing):
            return "NO_BUDGET"
        others = [(r, n) for r, n in self.ran if not self.must_yield(q, r)]
        partial = self.partial + sum(len(r.tokens) - r.computed - n > 1 for r, n in others)
        if count < missing and partial >= (self.c.max_num_partial_prefills or self.c.max_num_seqs):
            return "PARTIAL_PREFILLS"
        if victims:
            for r in yields[:victims]:
                self.room, self.reserved = self.room + 1, self.reserved - self.promised(r)
                self.preempt(r, 2)
            if blocks - len(hits) > self.left(q, hits, blocks):
                return "FENCED"
        for r in yields[victims:]:
            cut = min(dict(self.ran).get(r, 0), max(0, count - self.budget))
            self.skipped += cut > 0 and cut == dict(self.ran)[r]
            self.ran = [(other, n - cut if other is r else n) for other, n in self.ran]
            self.budget += cut
        self.b.hold(hits)
        q.blocks, q.content, q.named = list(hits), content, len(hits)
        now = blocks if reserve else self.up(computed + count)
        self.starts.append((q, computed, count, now - len(hits)))
        q.begun = True
        self.budget, self.room = self.budget - count, self.room - 1
        self.reserved, self.partial = self.reserved + blocks - now, self.partial + (count < missing)
        self.charge(q, computed + count, count)
        return ""

    def settle(self) -> None:
        starts, self.settled = self.starts[self.settled :], len(self.starts)
        for q, _, _, new in starts:
            q.blocks += self.b.allocate(new)
        for q, computed, count, _ in starts:
            self.b.name(q, (computed + count) // self.b.size)
