"""Pages once more, of plain lists: what the gold scheduler counts with where layers with a window have own blocks."""

from dataclasses import dataclass, field

from ipc.options.config import EngineConfig
from tests.core.scheduling.gold_blocks import GoldBlocks
from tests.core.scheduling.gold_entry import Block, Entry


@dataclass(eq=False)
class Page(Block):
    """Of layers that see all: it has several blocks. Of layers with a window: one, which is found beside a block."""

    blocks: list["PageBlock"] = field(default_factory=list)
    beside: "PageBlock | None" = None

    def found(self) -> bool:
        return self.beside is not None or any(block.name for block in self.blocks)


@dataclass(eq=False)
class PageBlock(Block):
    """Of layers that see all; only its name counts."""

    page: Page = field(default_factory=Page)
    found_beside: Page | None = None


class GoldPages(GoldBlocks):
    """`cached` and `fenced` have pages. An entry's `seen` are its pages of windows, of which `gone` are given back."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.ratio, self.window = config.kv_page_blocks or 0, config.kv_window or 0
        self.most_seen = -(-(self.window - 1 + (config.max_num_batched_tokens or 0)) // self.size) + 1

    def passed(self, tokens: int) -> int:
        return max(0, tokens - self.window + 1) // self.size

    def on_host(self, tokens: int) -> int:
        return self.up(tokens) + self.ratio * (self.up(tokens) - self.passed(tokens))

    def has_all(self, entry: Entry, tokens: int) -> bool:
        return entry.gone <= self.passed(tokens)

    def whole(self, q: Entry) -> bool:
        return q.whole or q.preemptions >= 8

    def goal(self, q: Entry) -> int:
        return self.up(q.max_total - 1 if self.whole(q) else len(q.tokens))

    def fits(self, q: Entry) -> bool:
        return self.at_most(q.max_total - 1) <= self.usable

    def at_most(self, tokens: int) -> int:
        return -(-self.up(tokens) // self.ratio) + min(self.up(tokens), self.most_seen)

    def room(self, r: Entry) -> int:
        return min(len(r.blocks), len(r.seen)) * self.size

    def lacks(self, entry: Entry, tokens: int) -> int:
        missing = [max(0, self.up(tokens) - len(have)) for have in (entry.blocks, entry.seen)]
        return -(-missing[0] // self.ratio) + missing[1]

    def missing(self, q: Entry, hits: list[Block]) -> int:
        """Pages with which it would start, beside these hits of its first blocks."""
        first = self.passed(q.computed)
        seen = min(self.goal(q) - first, self.most_seen)
        return -(-max(0, self.goal(q) - len(hits)) // self.ratio) + max(0, seen - max(0, len(hits) - first))

    def promised(self, rows: list[Entry]) -> int:
        count = 0
        for r in rows:
            if r in self.starting:
                blocks, first = self.goal(r), self.passed(r.computed)
                seen = min(blocks - first, self.most_seen) - (len(r.seen) - first)
            else:
                blocks = self.up(len(r.tokens))
                seen = min(blocks - r.gone, self.most_seen) - (len(r.seen) - r.gone)
            count += -(-max(0, blocks - len(r.blocks)) // self.ratio) + max(0, seen)
        return count

    def pages(self, hits: list[Block]) -> set[Block]:
        """Those of these blocks, and of what lies beside them in the window of the first token to compute."""
        seen = hits[self.passed(max(len(hits) * self.size, self.begin)) :]
        return {block.page for block in hits} | {block.found_beside for block in seen}  # type: ignore[attr-defined]

    def left(self, rows: list[Entry], hits: list[Block]) -> int:
        return self.free - sum(page in self.cached for page in self.pages(hits)) - self.promised(rows)

    def held(self, r: Entry) -> list[Block]:
        return [block.page for block in r.blocks] + r.seen[r.gone :]  # type: ignore[attr-defined]

    def given(self, victims: list[Entry], hits: list[Block]) -> int:
        held, aside = [page for r in victims for page in self.held(r)], self.pages(hits)
        freed = sum(held.count(page) == page.owners for page in set(held) - aside)
        return freed + self.promised(victims)

    def allocate(self, count: int) -> list[Block]:
        from_blank = min(count, self.blank)
        self.blank -= from_blank
        self.cached.sort(key=lambda page: page.urgency)
        evicted, self.cached = self.cached[: count - from_blank], self.cached[count - from_blank :]
        for page in evicted:
            self.lose(page)
        return [Page() for _ in range(count)]

    def lose(self, page: Block) -> None:
        """Nobody finds it any more, nor what lies beside its blocks alone."""
        assert isinstance(page, Page)
        if page.beside is not None:
            page.beside.found_beside = page.beside = None
        for block in page.blocks:
            self.names = {key: owner for key, owner in self.names.items() if owner is not block}
            block.name = 0
            if (other := block.found_beside) is not None:
                block.found_beside = other.beside = None
                self.blank += other in self.cached
                self.cached = [one for one in self.cached if one is not other]

    def hold(self, entry: Entry, hits: list[Block]) -> None:
        first = self.passed(entry.computed)
        seen = [block.found_beside for block in hits[first:]]  # type: ignore[attr-defined]
        pages = [block.page for block in hits] + seen  # type: ignore[attr-defined]
        self.cached = [page for page in self.cached if page not in pages]
        self.fenced = [page for page in self.fenced if page not in pages]
        for page in pages:
            page.owners += 1
        entry.blocks, entry.named, entry.gone = list(hits), len(hits), first
        entry.seen = [Page() for _ in range(first)] + seen
        self.starting.append(entry)

    def settle(self) -> None:
        starting, self.starting = self.starting, []
        ends = [self.goal(r) if self.whole(r) else self.up(r.computed + r.n) for r in starting]
        seen = [min(end - r.gone, self.most_seen) + r.gone for r, end in zip(starting, ends, strict=True)]
        self.give(starting, ends, seen)
        self.name(starting)

    def feed(self, rows: list[Entry]) -> None:
        ends = [self.up(r.computed + r.n) for r in rows]
        self.give(rows, ends, ends)

    def give(self, rows: list[Entry], ends: list[int], seen: list[int]) -> None:
        full = [-(-max(0, end - len(r.blocks)) // self.ratio) for r, end in zip(rows, ends, strict=True)]
        windows = [max(0, end - len(r.seen)) for r, end in zip(rows, seen, strict=True)]
        pages = self.allocate(sum(full) + sum(windows))
        for r, num_full, num_seen in zip(rows, full, windows, strict=True):
            for _ in range(num_full):
                page = pages.pop()
                assert isinstance(page, Page)
                page.owners, page.blocks = self.ratio, [PageBlock(page=page) for _ in range(self.ratio)]
                r.blocks += page.blocks
            r.seen += [pages.pop() for _ in range(num_seen)]

    def release(self, entry: Entry, steps_in_flight: int) -> None:
        self.part_with(entry, entry.seen[entry.gone :], steps_in_flight)
        self.part_with(entry, [block.page for block in entry.blocks], steps_in_flight)  # type: ignore[attr-defined]
        entry.seen, entry.gone = [], 0
        entry.blocks, entry.pending, entry.computed, entry.n, entry.stay = [], 0, 0, 0, entry.stay + 1
        self.lift(0)

    def part_with(self, entry: Entry, pages: list[Block], steps_in_flight: int) -> None:
        for page in pages:
            page.urgency = entry.urgency
        self.drop(pages, steps_in_flight)

    def slide(self, entry: Entry, window: int, steps_in_flight: int) -> None:
        end = min(self.passed(entry.computed), entry.named) if self.caching else self.passed(entry.computed)
        if end > entry.gone:
            self.part_with(entry, entry.seen[entry.gone : end], steps_in_flight)
            entry.gone = end

    def lift(self, steps: int) -> None:
        for page in self.fenced:
            page.fence -= steps
            if not page.fence and page.found():  # type: ignore[attr-defined]
                self.cached.append(page)
            elif not page.fence:
                self.blank += 1
        self.fenced = [page for page in self.fenced if page.fence]

    def find(self, entry: Entry) -> list[Block]:
        hits = super().find(entry)
        while hits and not (self.is_whole(hits) and self.may_end(entry, hits)):
            hits.pop()
            entry.content = hits[-1].name if hits else entry.salt
        return hits

    def is_whole(self, hits: list[Block]) -> bool:
        return None not in self.pages(hits)

    def may_end(self, entry: Entry, hits: list[Block]) -> bool:
        """With all its pages, of which those of its hits may have other blocks, too. Where it may not, it gets none."""
        total = self.up(entry.max_total - 1)
        pages = len({block.page for block in hits})  # type: ignore[attr-defined]
        pages += -(-(total - len(hits)) // self.ratio) + min(total, self.most_seen)
        if len(hits) + self.at_most(entry.max_total - 1) > self.usable < pages:
            hits[1:] = []
            return False
        return True

    def name(self, rows: list[Entry]) -> None:
        before = {r: (r.named, r.content) for r in rows}
        super().name(rows)
        for r in sorted(before, key=lambda r: r.named - before[r][0] > 1):
            named, content = before[r]
            for index in range(named, r.named):
                key = (content, tuple(r.tokens[index * self.size : (index + 1) * self.size]))
                owner, page = self.names[key], r.seen[index]
                assert isinstance(owner, PageBlock)
                assert isinstance(page, Page)
                content = owner.name
                if owner.found_beside is None and index >= r.gone:  # what it has passed is not copied back to it
                    owner.found_beside, page.beside = page, owner

    def forget(self) -> None:
        for owner in self.names.values():
            assert isinstance(owner, PageBlock)
            if owner.found_beside is not None:
                owner.found_beside.beside = None
            owner.name, owner.found_beside = 0, None
        self.names = {}
        self.blank += len(self.cached)
        self.cached = []
