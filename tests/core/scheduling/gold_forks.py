"""Several choices of a message as a rule of the gold model: one computes the prompt, and the others take it over."""

from ipc.options.config import EngineConfig
from tests.core.scheduling.gold_entry import Block, Entry
from tests.core.scheduling.gold_options import GoldWithOptions


class GoldWithForks(GoldWithOptions):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.kept: list[tuple[list[Entry], list[Block]]] = []  # prompts of those that ended before the others began

    def add_choices(self, choices: list[Entry]) -> bool:
        """False: they never fit."""
        for q in choices:
            q.choices = choices if len(choices) > 1 else []
            q.follows = q is not choices[0] and len(q.tokens) > 1
        return all([self.add(q) for q in choices])  # noqa: C419 (each is asked)

    def schedule(self, now: int) -> None:
        for q in list(self.waiting):
            if q.follows and any(r.computed >= r.first - 1 for r in q.choices if r in self.running):
                q.follows = False
        super().schedule(now)

    def finish(self, q: Entry) -> None:
        """A choice that ends before the others have begun leaves them the prompt, until the next step is made."""
        following = [r for r in q.choices if r.follows and r in self.waiting]
        if following:
            blocks = q.blocks[: self.b.up(q.first)]
            self.kept.append((q.choices, blocks))
            for block in blocks:
                block.owners += 1
            for r in following:
                r.follows = False
        super().finish(q)

    def guess(self) -> None:
        self.drop([choices for choices, _ in self.kept])
        super().guess()

    def drop(self, ended: list[list[Entry]]) -> None:
        for choices, blocks in self.kept:
            if choices in ended:
                self.b.drop(blocks, len(self.in_flight))
                self.b.lift(0)
        self.kept = [(choices, blocks) for choices, blocks in self.kept if choices not in ended]

    def end(self, q: Entry) -> None:
        """Where the choice that computes has ended, the next one does."""
        super().end(q)
        following = [r for r in q.choices if r.follows and r in self.waiting]
        if following and not q.follows:
            following[0].follows = False
        if not any(r in self.running + self.waiting for r in q.choices):
            self.drop([q.choices])

    def first(self) -> Entry | None:
        following = [q for q in self.waiting if q.follows]
        self.waiting = [q for q in self.waiting if not q.follows]
        first = super().first()
        self.waiting += following
        return first

    def find(self, q: Entry) -> list[Block]:
        hits = super().find(q)
        running = [r for r in q.choices if r in self.running and r not in self.starts]
        known = [(min(r.computed, q.first, len(q.tokens) - 1), -r.serial, r.blocks) for r in running]
        left = [(min(q.first, len(q.tokens) - 1), 1, blocks) for choices, blocks in self.kept if choices is q.choices]
        if q in self.copied or not known + left:
            return hits
        count, _, blocks = max(left or known, key=lambda one: one[:2])
        shared = count // self.b.size
        if count <= q.computed or (self.b.caching and shared != len(hits)):
            return hits
        q.computed = count
        return hits if self.b.caching else blocks[:shared]
