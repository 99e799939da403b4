"""Drafts as one more rule of the gold model: leftovers of a step, the likeliest first where the budget is short."""

from collections import defaultdict
from collections.abc import Callable

from core.proposers.proposer import OFFERED
from ipc.options.config import EngineConfig
from tests.core.scheduling.gold_entry import Entry
from tests.core.scheduling.gold_options import GoldWithOptions

#: A request and a position -> guesses of its tokens from there on, and their kind.
Guess = Callable[[int, int], tuple[list[int], int]]


class GoldWithDrafts(GoldWithOptions):
    """Drafts cost no time here; core/scheduling/draft_rule.py has tests of its own."""

    guesses: Guess

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        assert config.speculative_config is not None
        self.most_drafts = config.speculative_config.num_speculative_tokens
        self.of_kind: dict[int, list[int]] = defaultdict(lambda: [0, 0])  # tried, right
        self.of_stay: dict[tuple[Entry, int], list[int]] = defaultdict(lambda: [0, 0])
        self.kind: dict[Entry, int] = {}

    def guess(self) -> None:
        if not self.budget():
            return
        wishes = []
        for r in self.running:
            decodes = r not in self.starts and r.n == 1 and r.computed + 1 == len(r.tokens) + r.pending
            if decodes and len(r.tokens) > r.first:
                drafts, self.kind[r] = self.guesses(r.number, len(r.tokens))
                drafts = drafts[: self.most_drafts + r.pending][r.pending :]  # others follow the tokens in flight
                wishes.append((r, drafts[: max(0, min(r.max_total - 2 - r.computed, self.most_drafts))]))
        left, room = self.likeliest(wishes), self.room()
        for r, drafts in wishes:
            end = r.computed + 1
            count = left.count(r)
            needed = max(0, self.b.up(end + count) - len(r.blocks))
            room -= needed
            if room < 0:
                count, needed = min(count, len(r.blocks) * self.b.size - end), 0
            r.blocks += self.b.allocate(needed)
            r.drafts = drafts[:count]

    def likeliest(self, wishes: list[tuple[Entry, list[int]]]) -> list[Entry]:
        """Rows, each once for every draft that the budget has room for."""
        chances = []
        for r, drafts in wishes:
            (tried, right), (all_tried, all_right) = self.of_stay[r, r.stay], self.of_kind[self.kind[r]]
            first_right = 2 if self.kind[r] == OFFERED else 1
            chance, together = (right + 4 * ((all_right + first_right) / (all_tried + 3))) / (tried + 4), 1.0
            for _ in drafts:
                together *= chance
                chances.append((together, r))
        chances.sort(key=lambda one: -one[0])
        return [r for _, r in chances[: min(self.budget(), 128)]]

    def room(self) -> int:
        """Blocks for drafts: none while a request waits; a block stays free for every row to grow by."""
        promised = sum(max(0, self.b.up(len(r.tokens)) - len(r.blocks)) for r in self.running if r not in self.starts)
        promised += sum(self.b.lacks(q, len(q.tokens)) for q in self.starts)
        return 0 if self.waiting else max(0, self.b.free - self.watermark - promised - len(self.running))

    def judge(self, r: Entry, drafts: list[int], right: int) -> None:
        if drafts:
            tried = min(right + 1, len(drafts))
            for record, most in ((self.of_stay[r, r.stay], 32), (self.of_kind[self.kind[r]], 1024)):
                record[0] += tried
                record[1] += right
                if record[0] >= most:
                    record[:] = record[0] // 2, record[1] // 2
