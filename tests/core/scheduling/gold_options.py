"""The scheduler's less common options, each as a change of one rule of the gold model."""

from collections import Counter

from ipc.options.config import EngineConfig
from tests.core.scheduling.gold_entry import Block, Entry
from tests.core.scheduling.gold_scheduler import Gold


class GoldWithOptions(Gold):
    """Also: look-ahead, watermark, swap and its costs, reservation of the full length, prompts limited in a step or in
    number, or whole in steps of their own, delay."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.is_whole = not config.enable_chunked_prefill
        self.watermark = int(config.watermark * (config.num_blocks_override or 0))
        self.slots = config.num_swap_blocks or 0  # free ones, of blocks on the host
        self.copied: dict[Entry, int] = {}  # blocks on the host
        self.overtaken = Counter[Entry]()
        self.latency, self.began = 0, -1  # ns: of the last step that began prompts; when one did, -1 when it did not

    def add(self, q: Entry) -> bool:
        q.whole = self.c.reserve_full_length
        is_too_long = self.is_whole and q.max_total - 1 > self.c.max_num_batched_tokens
        return not is_too_long and super().add(q)

    def schedule(self, now: int) -> None:
        for r in self.running:
            r.n = 0
        super().schedule(now)
        for q in self.starts:  # all read their copies in this step
            self.forget_copy(q)

    # Swap: what is cheaper to copy than to compute again waits on the host.

    def again(self, tokens: int) -> int:
        """ns"""
        return tokens * (self.c.recompute_ns_per_token or 1)

    def copy(self, tokens: int) -> int:
        """ns, out and back"""
        return self.b.on_host(tokens) * 2 * (self.c.swap_ns_per_block or 1)

    def sacrifice(self, r: Entry) -> tuple[int, ...]:
        again, copy = self.again(r.computed), self.copy(r.computed)
        by_choices = copy if r.choices else again
        costs = {"recompute": again, "swap": copy, "auto": min(again, copy), "by_choices": by_choices}
        cost = costs[self.c.preemption_mode]
        return (*self.policy.value(r), cost, -r.rank, -r.serial)

    def preempt(self, r: Entry, cause: int) -> None:
        kept = min(r.computed, len(r.tokens) - 1)
        is_cheap = self.c.preemption_mode == "swap" or self.copy(kept) < self.again(kept)
        if self.c.preemption_mode == "by_choices":
            is_cheap = bool(r.choices)
        is_whole = self.b.has_all(r, kept)
        super().preempt(r, cause)
        if 0 < self.b.on_host(kept) <= self.slots and is_cheap and is_whole:
            r.kept, self.copied[r] = kept, self.b.on_host(kept)
            self.slots -= self.copied[r]

    def forget_copy(self, q: Entry) -> None:
        self.slots += self.copied.pop(q, 0)
        q.kept = 0

    def leave(self, q: Entry) -> None:
        super().leave(q)
        self.forget_copy(q)

    # Look-ahead: others may pass by one that does not fit, so many in its life.

    def first(self) -> Entry | None:
        if self.refused:
            passed, lookahead = next(iter(self.refused)), self.c.admission_lookahead
            holds = list(self.refused.values())[-1] not in ("NO_BLOCKS", "PARTIAL_PREFILLS")
            if holds or len(self.refused) > lookahead or self.overtaken[passed] >= lookahead:
                return None
        waiting = [q for q in self.waiting if q not in self.refused and (q.begun or not self.shut)]
        return min(waiting, key=self.policy.queue, default=None)

    # Prompts: limited in a step while others live, or in number, or whole and in steps of their own.

    def divide(self, rows: list[Entry], fed: int = 10**9) -> int | None:
        self.limit_each()
        return super().divide(rows, fed)

    def limit_each(self) -> None:
        num_live = len(self.running) + len(self.waiting) - len(self.refused)
        self.most = self.tokens if num_live < 2 else self.c.long_prefill_token_threshold or self.tokens

    def grow(self) -> None:
        if not self.is_whole:
            super().grow()

    def admit(self) -> None:
        """Delay: prompts gather for so many times the duration of the last step that began some."""
        if self.began >= 0:
            self.latency, self.began = self.now - self.began, -1
        first, delay = self.first(), self.c.scheduler_delay_factor * self.latency
        if not (first and self.running and self.now - first.arrival < delay):
            super().admit()
            self.began = self.now if self.starts else -1
        if self.is_whole and not self.starts:
            super().grow()
        elif self.is_whole:
            self.skipped += sum(want > 0 for want in self.wants([r for r in self.running if r not in self.starts]))

    def attempt(self, q: Entry) -> str:
        self.limit_each()
        return super().attempt(q)

    def left(self, q: Entry, hits: list[Block]) -> int:
        return super().left(q, hits) - (self.watermark if self.running else 0)

    def start(self, q: Entry, count: int, hits: list[Block], victims: list[Entry], givers: list[Entry]) -> str:
        others = [r for r in self.running if r not in victims + givers]
        num_partial = sum(r.wanted() - r.n > (r not in self.starts) for r in others)
        if count < q.wanted() and self.is_whole:
            return "NO_BUDGET"
        if count < q.wanted() and num_partial >= (self.c.max_num_partial_prefills or self.c.max_num_seqs):
            return "PARTIAL_PREFILLS"
        refusal = super().start(q, count, hits, victims, givers)
        if self.refused and not refusal:
            self.overtaken[next(iter(self.refused))] += 1
        return refusal
