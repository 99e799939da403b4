"""The scheduler's rules once more, slow and of plain lists: tests compare every decision of core's with them."""

from collections.abc import Callable
from itertools import accumulate

from ipc.options.config import EngineConfig
from tests.core.scheduling.gold_blocks import GoldBlocks
from tests.core.scheduling.gold_entry import Block, Entry
from tests.core.scheduling.gold_pages import GoldPages
from tests.core.scheduling.gold_policy import GoldPolicy


class Gold:
    """Growth of those that run, preemption by recompute, starts in strict order with victims of lower classes, fences.
    Left to gold_options.py: look-ahead, watermark, swap, limited or whole prompts, delay, reservation. A pause sets
    `shut` (nothing begins), and of all `tokens` = 0."""

    def __init__(self, config: EngineConfig) -> None:
        self.c, self.policy = config, GoldPolicy(config)
        self.b = GoldPages(config) if config.kv_page_blocks else GoldBlocks(config)
        self.tokens = self.most = config.max_num_batched_tokens  # of a step, of a request in a step
        self.shut = False
        self.running, self.waiting = list[Entry](), list[Entry]()
        self.in_flight: list[list[tuple[Entry, int, bool, list[int]]]] = []  # row, its stay, whether it samples, drafts

    def add(self, q: Entry) -> bool:
        """False: it never fits."""
        if not self.b.fits(q):
            return False
        q.first = len(q.tokens)
        self.policy.join(q, self.running + self.waiting)
        self.waiting.append(q)
        return True

    def finish(self, q: Entry) -> None:
        """It has all its tokens."""
        self.end(q)

    def end(self, q: Entry) -> None:
        """It has all its tokens, or is aborted."""
        self.about_to_leave([q] if q in self.running else [])
        self.leave(q)

    def leave(self, q: Entry) -> None:
        (self.running if q in self.running else self.waiting).remove(q)
        self.b.release(q, len(self.in_flight))
        if not self.running + self.waiting:
            self.policy.leave(q)

    def preempt(self, r: Entry, cause: int) -> None:
        self.about_to_leave([r])
        self.preempted[r] = cause  # 1: for a running row, 2: for one that starts
        r.preemptions += cause == 1
        r.served = max(r.served, r.computed)
        self.leave(r)
        self.waiting.append(r)

    def sacrifice(self, r: Entry) -> tuple[int, ...]:
        """The smallest is the first victim."""
        return (*self.policy.value(r), r.computed, -r.rank, -r.serial)

    def budget(self) -> int:
        return self.tokens - sum(r.n + len(r.drafts) for r in self.running)

    def schedule(self, now: int) -> None:
        self.now, self.skipped, self.preempted = now, 0, dict[Entry, int]()  # skipped: rows that want and get nothing
        self.starts, self.refused = list[Entry](), dict[Entry, str]()
        for r in self.running + self.waiting:
            r.drafts = []
        for r in sorted(self.running, key=lambda r: (r.rank, r.serial)) if self.c.kv_window else []:
            before = r.gone
            self.b.slide(r, self.c.kv_window or 0, len(self.in_flight))
            if r.gone > before:
                self.slid(r)
        self.b.lift(0)
        self.grow()
        self.admit()
        self.guess()
        batch = [r for r in self.running if r.n]
        self.b.name(batch)
        self.keep(batch)
        self.policy.charge([r for r in batch if r not in self.starts])
        self.in_flight += [[(r, r.stay, r.advance(), r.drafts) for r in batch]] if batch else []

    def update(self, token: Callable[[int, int], int]) -> list[int]:
        """The oldest step is back; token: of (request, position). Returns who has ended."""
        self.b.lift(1)
        step = self.in_flight.pop(0)
        live = [r for r, stay, samples, _ in step if samples and r.stay == stay]
        ended = [r for r, stay, samples, drafts in step if samples and r.stay == stay and self.take(r, drafts, token)]
        if any(drafts for *_, drafts in step):
            for r in live:
                r.n = 0
            self.b.name(live)
        self.about_to_leave(ended)
        for r in ended:
            self.finish(r)
        return [r.number for r in ended]

    def about_to_leave(self, rows: list[Entry]) -> None:
        """These give back their blocks; GoldWithPins keeps some."""

    def slid(self, r: Entry) -> None:
        """It has given back blocks that its window has passed; GoldWithPins keeps some."""

    def forget(self) -> None:
        """The prefix cache is emptied."""
        self.b.forget()

    def guess(self) -> None:
        """Give drafts; GoldWithDrafts does."""

    def keep(self, batch: list[Entry]) -> None:
        """Keep recurrent states of the step; GoldWithStates does."""

    def take(self, r: Entry, drafts: list[int], token: Callable[[int, int], int]) -> bool:
        """The row's sampled tokens, one and one more for each right draft; whether the last was among them."""
        right = 0
        while right < len(drafts) and drafts[right] == token(r.number, len(r.tokens) + right):
            right += 1
        self.judge(r, drafts, right)
        r.n = right
        self.policy.charge([r] if right else [])
        r.computed += right
        return any(r.take(token(r.number, len(r.tokens))) for _ in range(right + 1))

    def judge(self, r: Entry, drafts: list[int], right: int) -> None:
        """So many of the row's drafts were right."""

    def wants(self, rows: list[Entry], fed: int = 10**9) -> list[int]:
        """Tokens that each could take now, in this order; from row `fed` on only for blocks it has. With stages rows
        whose token is being sampled want none, and of those that decode only a share does."""
        wants, stages = list[int](), self.c.pipeline_parallel_size
        turns = -(-len(rows) // stages) if stages > 1 else 10**9
        for index, r in enumerate(rows):
            wanted = 0 if stages > 1 and r.pending else min(r.wanted(), self.most)
            if index >= fed:
                wanted = min(wanted, self.b.room(r) - r.computed)
            turns -= wanted == 1
            wants.append(wanted if wanted != 1 or turns >= 0 else 0)
        return wants

    def divide(self, rows: list[Entry], fed: int = 10**9) -> int | None:
        """Give tokens in this order, from row `fed` on only for blocks it has. Returns the first short of blocks."""
        for r in rows:
            r.n = 0
        left = self.budget()
        for r, wanted in zip(rows, self.wants(rows, fed), strict=True):
            r.n = min(wanted, left)
            left -= r.n
        needs = accumulate(self.b.growth([r]) for r in rows)
        return next((i for i, needed in enumerate(needs) if needed > self.b.free), None)

    def grow(self) -> None:
        rows = self.running
        rows.sort(key=lambda r: (r.rank, r.serial))
        if self.divide(rows) is not None or not self.budget():
            rows.sort(key=self.policy.place)
        while (short := self.divide(rows)) is not None and self.b.growth(rows) > self.b.free + len(self.b.fenced):
            level = rows[short].priority  # of which nobody older goes, nor who has all that he can need
            later = [r for r in rows[short + 1 :] if r.priority != level or self.b.lacks(r, r.max_total - 1)]
            if not later:
                break
            self.preempt(min(later, key=self.sacrifice), 1)
        if short is not None:
            wanted = [r.n for r in rows]
            self.divide(rows, short)
            self.skipped += sum(want > 0 and not r.n for want, r in zip(wanted, rows, strict=True))
        self.b.feed(rows)

    def first(self) -> Entry | None:
        """The next entry to start; no entry overtakes one that cannot start."""
        waiting = [q for q in self.waiting if q.begun or not self.shut]
        return min(waiting, key=self.policy.queue) if waiting and not self.refused else None

    def admit(self) -> None:
        first, is_full = self.first(), not self.budget() or len(self.running) >= self.c.max_num_seqs
        if first and is_full and not self.yielding(first):
            self.refused[first] = "NO_ROW" if self.budget() else "NO_BUDGET"
            return
        while q := self.first():
            if refusal := self.attempt(q):
                self.refused[q] = refusal
        self.b.settle()

    def yielding(self, q: Entry) -> list[Entry]:
        """Those that make room for it."""
        rows, live = [r for r in self.running if r not in self.starts], self.running + self.waiting
        return [r for r in rows if self.policy.must_yield(r, q, rows, live)]

    def left(self, q: Entry, hits: list[Block]) -> int:
        """Blocks for it to start with; the oftener it was preempted, the more of them stay free beside others."""
        most = self.b.up(q.max_total - 1) - self.b.goal(q)
        return self.b.left(self.running, hits) - (min(2**q.preemptions - 1, most) if self.running else 0)

    def attempt(self, q: Entry) -> str:
        """Start it: "", or say what it lacks."""
        if q in self.preempted:
            return "PREEMPTED"
        hits = self.find(q)
        lack = self.b.missing(q, hits) - self.left(q, hits)
        yields = sorted(self.yielding(q), key=self.sacrifice)
        enough = [i for i in range(len(yields) + 1) if self.b.given(yields[:i], hits) >= lack]
        go = next((i for i in enough if len(self.running) - i < self.c.max_num_seqs), None)  # so many, no more
        if go is None:
            return "NO_ROW" if enough else "NO_BLOCKS"
        count = min(q.wanted(), self.most, self.budget() + sum(r.n for r in yields))
        return self.start(q, count, hits, yields[:go], yields[go:]) if count else "NO_BUDGET"

    def find(self, q: Entry) -> list[Block]:
        """Blocks that it need not compute."""
        hits = self.b.find(q)
        q.computed = self.b.begin = max(len(hits) * self.b.size, q.kept)
        return hits

    def start(self, q: Entry, count: int, hits: list[Block], victims: list[Entry], givers: list[Entry]) -> str:
        """Start q with the victims' blocks and rows, and with tokens of the givers, which keep their blocks."""
        for r in victims:
            self.preempt(r, 2)
        if self.b.missing(q, hits) > self.left(q, hits):
            return "FENCED"
        for r in givers:
            cut = min(r.n, max(0, count - self.budget()))
            self.skipped += 0 < cut == r.n
            r.n -= cut
        q.n, q.begun = count, True
        self.policy.charge([q])
        self.b.hold(q, hits)
        self.waiting.remove(q)
        self.running.append(q)
        self.starts.append(q)
        return ""
