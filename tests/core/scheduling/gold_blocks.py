"""KV blocks and the prefix cache once more, of plain lists and dicts: what the gold scheduler counts with."""

from ipc.options.config import EngineConfig
from tests.core.scheduling.gold_entry import Block, Entry, Key


class GoldBlocks:
    def __init__(self, config: EngineConfig) -> None:
        self.size, self.caching = config.block_size, config.enable_prefix_caching
        self.blank = self.usable = (config.num_blocks_override or 0) - 1  # blank: any is as good, as nobody finds it
        self.cached: list[Block] = []  # free, and found by their content; the first goes first
        self.fenced: list[Block] = []
        self.names: dict[Key, Block] = {}
        self.num_names = self.begin = 0  # begin: tokens that the request has with which it may start
        self.starting: list[Entry] = []  # in this step, and have only the blocks that they found

    @property
    def free(self) -> int:
        return self.blank + len(self.cached)

    def up(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def lacks(self, entry: Entry, tokens: int) -> int:
        """Blocks that it must get before so many of its tokens are computed."""
        is_whole = entry.whole or entry.preemptions >= 8
        return max(0, self.up(entry.max_total - 1 if is_whole else tokens) - len(entry.blocks))

    def fits(self, q: Entry) -> bool:
        """Whether it could run alone."""
        return self.up(q.max_total - 1) <= self.usable

    def room(self, r: Entry) -> int:
        """Tokens that its blocks have room for."""
        return len(r.blocks) * self.size

    def goal(self, q: Entry) -> int:
        """Blocks with which it would start, hits included."""
        return self.lacks(q, len(q.tokens))

    def missing(self, q: Entry, hits: list[Block]) -> int:
        """Blocks with which it would start, beside these hits."""
        return self.goal(q) - len(hits)

    def promised(self, rows: list[Entry]) -> int:
        """Blocks that they must get to compute what is known of them."""
        return sum(self.lacks(r, len(r.tokens)) for r in rows)

    def left(self, rows: list[Entry], hits: list[Block]) -> int:
        """Free blocks beside these, and promised to none of the rows."""
        return self.free - sum(block in self.cached for block in hits) - self.promised(rows)

    def given(self, victims: list[Entry], hits: list[Block]) -> int:
        """Blocks that their end would give, these aside; what they share goes with the last owner."""
        held = [block for r in victims for block in r.blocks[r.gone :] if block not in hits]
        return sum(held.count(block) == block.owners for block in set(held)) + self.promised(victims)

    def allocate(self, count: int) -> list[Block]:
        from_blank = min(count, self.blank)
        self.blank -= from_blank
        if from_blank == count:
            return [Block() for _ in range(count)]
        self.cached.sort(key=lambda block: block.urgency)  # keeps the order within
        evicted, self.cached = self.cached[: count - from_blank], self.cached[count - from_blank :]
        self.names = {key: block for key, block in self.names.items() if block not in evicted}
        return [Block() for _ in range(count)]

    def on_host(self, tokens: int) -> int:
        """Blocks that are copied with so many tokens."""
        return self.up(tokens)

    def has_all(self, entry: Entry, tokens: int) -> bool:
        """Whether none of these is given back."""
        return not entry.gone

    def hold(self, entry: Entry, hits: list[Block]) -> None:
        """The request starts with what it has found; see settle()."""
        self.cached = [block for block in self.cached if block not in hits]
        self.fenced = [block for block in self.fenced if block not in hits]
        for block in hits:
            block.owners += 1
        entry.blocks, entry.named = list(hits), len(hits)
        self.starting.append(entry)

    def settle(self) -> None:
        """Those that start get their blocks, and others find what they compute there."""
        self.feed(self.starting)
        self.name(self.starting)
        self.starting = []

    def growth(self, rows: list[Entry]) -> int:
        """Blocks that they must get for their tokens of this step."""
        return sum(self.lacks(r, r.computed + r.n) for r in rows)

    def feed(self, rows: list[Entry]) -> None:
        for r in rows:
            r.blocks += self.allocate(self.growth([r]))

    def release(self, entry: Entry, steps_in_flight: int) -> None:
        self.give_back(entry, len(entry.blocks), steps_in_flight)
        entry.gone = 0
        entry.blocks, entry.pending, entry.computed, entry.n, entry.stay = [], 0, 0, 0, entry.stay + 1
        self.lift(0)

    def give_back(self, entry: Entry, end: int, steps_in_flight: int) -> None:
        """Its blocks before this place, those aside that are gone."""
        for block in entry.blocks[entry.gone : end]:
            block.urgency = entry.urgency
        self.drop(entry.blocks[entry.gone : end], steps_in_flight)
        entry.gone = max(entry.gone, end)

    def slide(self, entry: Entry, window: int, steps_in_flight: int) -> None:
        """Nobody sees tokens before its next token's window."""
        end = max(0, entry.computed - window + 1) // self.size
        if not entry.choices:
            self.give_back(entry, min(end, entry.named) if self.caching else end, steps_in_flight)

    def drop(self, blocks: list[Block], steps_in_flight: int) -> None:
        for block in reversed(blocks):
            block.owners -= 1
            if not block.owners:
                block.fence = steps_in_flight
                self.fenced.append(block)

    def lift(self, steps: int) -> None:
        """So many are back."""
        if not self.fenced:
            return
        for block in self.fenced:
            block.fence -= steps
            if not block.fence and block.name:
                self.cached.append(block)
            elif not block.fence:
                self.blank += 1
        self.fenced = [block for block in self.fenced if block.fence]

    def find(self, entry: Entry) -> list[Block]:
        self.begin = 0
        begin = (entry.salt, entry.tokens[: self.size])
        if len(begin[1]) == self.size and any(begin == (s.salt, s.tokens[: self.size]) for s in self.starting):
            self.settle()
        blocks: list[Block] = []
        entry.content = entry.salt
        for start in range(0, len(entry.tokens) - self.size, self.size):  # never the last token
            block = self.names.get((entry.content, tuple(entry.tokens[start : start + self.size])))
            if block is None:
                break
            blocks.append(block)
            entry.content = block.name
        return blocks

    def name(self, rows: list[Entry]) -> None:
        """What they compute in this step is found from now on. Those of one block go first."""
        full = {r: min(r.computed + r.n, len(r.tokens)) // self.size for r in rows if self.caching}
        for r in sorted(full, key=lambda r: full[r] - r.named > 1):
            for index in range(r.named, full[r]):
                key = (r.content, tuple(r.tokens[index * self.size : (index + 1) * self.size]))
                owner = self.names.setdefault(key, r.blocks[index])
                if not owner.name:
                    self.num_names += 1
                    owner.name = self.num_names
                r.content, r.named = owner.name, index + 1

    def forget(self) -> None:
        for block in self.names.values():
            block.name = 0
        self.names = {}
        self.blank += len(self.cached)
        self.cached = []
