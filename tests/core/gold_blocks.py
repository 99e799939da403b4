"""KV blocks and the prefix cache once more, of plain lists and dicts: what the gold scheduler counts with."""

from dataclasses import dataclass, field

Key = tuple[int | str, tuple[int, ...]]  # (name of the block before it, or the salt; its tokens)


@dataclass(eq=False)
class Block:
    owners: int = 1
    name: int | None = None
    key: Key | None = None
    fence: int = -1
    urgency: int = 0  # of its last user, where that counts: -1, 0, 1


@dataclass(eq=False)
class Entry:
    """A live request."""

    number: int
    client: int
    serial: int
    priority: int
    arrival: int
    tokens: list[int]
    max_total: int
    salt: str
    eos: int
    rank: int = 0
    blocks: list[Block] = field(default_factory=list)
    content: int | str = ""  # name of the last of the named blocks
    named: int = 0
    computed: int = 0
    pending: int = 0  # tokens that steps in flight sample
    stay: int = 0  # counts its times in a row
    slots: int = 0  # on the host
    kept: int = 0  # tokens in those
    served: int = 0  # most tokens it had computed when it was preempted
    begun: bool = False
    preemptions: int = 0
    overtaken: int = 0


class GoldBlocks:
    def __init__(self, num_blocks: int, size: int, caching: bool, by_urgency: bool) -> None:
        self.size, self.caching, self.by_urgency = size, caching, by_urgency
        self.blank = num_blocks - 1  # without content, so it does not matter which one is taken
        self.cached: list[Block] = []  # free, and found by their content; the first goes first
        self.fenced: list[Block] = []
        self.names: dict[Key, Block] = {}
        self.num_names = 0

    @property
    def free(self) -> int:
        return self.blank + len(self.cached)

    def allocate(self, count: int) -> list[Block]:
        from_blank = min(count, self.blank)
        self.blank -= from_blank
        self.cached.sort(key=lambda block: block.urgency)  # keeps the order within
        for block in self.cached[: count - from_blank]:
            assert block.key is not None
            del self.names[block.key]
        self.cached = self.cached[count - from_blank :]
        return [Block() for _ in range(count)]

    def hold(self, blocks: list[Block]) -> None:
        self.cached = [block for block in self.cached if block not in blocks]
        self.fenced = [block for block in self.fenced if block not in blocks]
        for block in blocks:
            block.owners += 1

    def release(self, entry: Entry, last_step_in_flight: int | None) -> None:
        for block in reversed(entry.blocks):
            block.owners -= 1
            block.urgency = (entry.priority < 0) - (entry.priority > 0) if self.by_urgency else 0
            if not block.owners and last_step_in_flight is not None:
                block.fence = last_step_in_flight
                self.fenced.append(block)
            elif not block.owners:
                self._put(block)
        entry.blocks, entry.pending, entry.computed, entry.stay = [], 0, 0, entry.stay + 1

    def lift(self, step: int) -> None:
        for block in [block for block in self.fenced if block.fence <= step]:
            self._put(block)
        self.fenced = [block for block in self.fenced if block.fence > step]

    def _put(self, block: Block) -> None:
        if block.name is None:
            self.blank += 1
        else:
            self.cached.append(block)

    def find(self, entry: Entry) -> tuple[list[Block], int | str]:
        content: int | str = entry.salt
        blocks: list[Block] = []
        for start in range(0, len(entry.tokens) - self.size, self.size):  # never the last token
            block = self.names.get((content, tuple(entry.tokens[start : start + self.size])))
            if block is None or block.name is None:
                break
            blocks.append(block)
            content = block.name
        return blocks, content

    def name(self, entry: Entry, count: int) -> None:
        for index in range(entry.named, count if self.caching else 0):
            key = (entry.content, tuple(entry.tokens[index * self.size : (index + 1) * self.size]))
            owner = self.names.setdefault(key, entry.blocks[index])
            if owner.name is None:
                self.num_names += 1
                owner.name, owner.key = self.num_names, key
            entry.content, entry.named = owner.name, index + 1

    def forget(self) -> None:
        for block in self.names.values():
            block.name = block.key = None
        self.names = {}
        self.blank += len(self.cached)
        self.cached = []
