"""Recurrent states once more, of plain lists and dicts: which are kept, and from which a request starts."""

from ipc.options.config import EngineConfig
from tests.core.scheduling.gold_blocks import GoldBlocks
from tests.core.scheduling.gold_entry import Block, Entry
from tests.core.scheduling.gold_options import GoldWithOptions

#: In place of the constants of core/batch/kept_states.py: the prompts of these tests are short.
LEAST_TOKENS, LEAST_DISTANCE, MOST_GUESSES = 3, 8, 4


class GoldStates(GoldBlocks):
    """Blocks of a model with recurrent layers: a prefix is found up to its last state."""

    def __init__(self, config: EngineConfig, num_slots: int) -> None:
        super().__init__(config)
        first = config.max_num_seqs
        self.blank_slots = list(range(first + num_slots - 1, first - 1, -1))
        self.slots: dict[int, int] = {}  # of a state, by the name of the block before it, least recently used first
        self.guesses: list[int] = []
        self.most_guesses, self.most_slots = num_slots // 2, num_slots
        self.pinned: list[int] = []  # names of states that pins have, each as often
        self.free_states = 0  # of swapped requests

    def has_all(self, entry: Entry, tokens: int) -> bool:
        return super().has_all(entry, tokens) and entry.computed == tokens and self.free_states > 0

    def find(self, entry: Entry) -> list[Block]:
        hits = super().find(entry)
        if hits:
            entry.known = len(hits) * self.size
        while hits and hits[-1].name not in self.slots:
            hits.pop()
        entry.content = hits[-1].name if hits else entry.salt
        return hits

    def begin_from(self, hits: list[Block]) -> int:
        """The slot from which a request with these hits starts."""
        name = hits[-1].name
        self.slots[name] = slot = self.slots.pop(name)
        self.guesses = [guess for guess in self.guesses if guess != name]
        return slot

    def named(self, r: Entry, tokens: int) -> int:
        """The name of the block at the end of its first tokens; 0: it has none."""
        if name := r.blocks[tokens // self.size - 1].name:
            return name
        content: int | str = r.salt  # another block has the content
        for start in range(0, tokens, self.size):
            owner = self.names.get((content, tuple(r.tokens[start : start + self.size])))
            if owner is None:
                return 0
            content = owner.name
        assert isinstance(content, int)
        return content

    def places(self, r: Entry, begin: int, end: int) -> list[tuple[int, bool]]:
        """Where its prompt has states after `begin`, up to `end`, and whether they are guesses."""
        last = (r.first - 1) // self.size * self.size
        wanted = {r.known: False, last: False} | dict.fromkeys(r.wanted_places, False)
        if self.most_guesses:
            distance = max(self.size, LEAST_DISTANCE)
            while r.first > distance * min(self.most_guesses, MOST_GUESSES):
                distance *= 2
            for place in range(distance, last - LEAST_TOKENS + 1, distance):
                if abs(place - r.known) >= LEAST_TOKENS:
                    wanted.setdefault(place, True)
            wanted.setdefault(last - self.size, True)
        inside = range(max(begin + 1, LEAST_TOKENS), min(end, last) + 1)
        wanted = {place: guess for place, guess in wanted.items() if place in inside}
        whole = end // self.size * self.size
        if end < len(r.tokens) and begin < whole <= last:  # the rest of what is known follows in a later step
            wanted.setdefault(whole, self.most_guesses > 0)
        return sorted(wanted.items())

    def keep(self, rows: list[Entry]) -> list[tuple[int, int, int]]:
        """The states that a step stores: (number of its request, tokens of the step before it, slot)."""
        saved: dict[int, tuple[int, int]] = {}
        for r in rows:
            begin = r.computed
            if begin >= r.first - 1 or not self.caching:
                continue
            for place, is_guess in self.places(r, begin, begin + r.n):
                if (slot := self.slot(self.named(r, place), is_guess)) is not None:
                    saved[slot] = r.number, place - begin
        return [(number, after, slot) for slot, (number, after) in saved.items()]

    def slot(self, name: int, is_guess: bool) -> int | None:
        if not name:
            return None
        if name in self.slots:
            self.slots[name] = self.slots.pop(name)
            if not is_guess:
                self.guesses = [guess for guess in self.guesses if guess != name]
            return None
        if is_guess and len(self.guesses) >= self.most_guesses:
            slot = self.slots.pop(self.guesses.pop(0))
        elif self.blank_slots:
            slot = self.blank_slots.pop()
        else:
            oldest = next((kept for kept in self.slots if kept not in self.pinned), 0)
            if not oldest:
                return None
            slot = self.slots.pop(oldest)
            self.guesses = [guess for guess in self.guesses if guess != oldest]
        self.slots[name] = slot
        self.guesses += [name] * is_guess
        return slot


class GoldWithStates(GoldWithOptions):
    """Also: states, kept for later requests and copied with the blocks of those that are swapped."""

    def __init__(self, config: EngineConfig, num_slots: int, num_swapped: int) -> None:
        super().__init__(config)
        self.b: GoldStates = GoldStates(config, num_slots)
        self.num_swapped = num_swapped
        self.waiting_copies: list[tuple[int, int]] = []
        #: Of the last plan: slots that it copies from and to; 0: a row's, -1: a swapped request's.
        self.moved: list[tuple[int, int]] = []
        self.saved: list[tuple[int, int, int]] = []  # of the last plan: from GoldStates.keep()

    def preempt(self, r: Entry, cause: int) -> None:
        self.b.free_states = self.num_swapped - len(self.copied)
        super().preempt(r, cause)
        if r in self.copied:
            self.waiting_copies.append((0, -1))

    def start(self, q: Entry, count: int, hits: list[Block], victims: list[Entry], givers: list[Entry]) -> str:
        q.hits = len(hits)
        return super().start(q, count, hits, victims, givers)

    def guess(self) -> None:
        """All is decided: those that start have their states copied, kept ones first."""
        copied = [q for q in self.starts if q in self.copied and q.kept == q.computed]
        kept = [q for q in self.starts if q.hits and q not in copied]
        self.waiting_copies += [(self.b.begin_from(q.blocks[: q.hits]), 0) for q in kept]
        self.waiting_copies += [(-1, 0) for _ in copied]
        super().guess()

    def keep(self, batch: list[Entry]) -> None:
        self.moved, self.saved = [], []
        if batch:
            self.moved, self.waiting_copies, self.saved = self.waiting_copies, [], self.b.keep(batch)
