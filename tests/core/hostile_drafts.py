"""Hostile proposers: drafts that are always right, always wrong, by chance, or longer than allowed."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from core.batch.table import BatchTable
from core.executors.fake import choice_seed
from core.proposers.proposer import NUM_KINDS, Proposals
from core.scheduling.scheduler import Scheduler
from ipc.options.speculation import SpeculativeConfig
from ipc.tables.arrays import Ints, Rows
from tests.fake_tokens import fake_tokens

KINDS = ("right", "wrong", "random", "long")

#: The next tokens of a row: (row, how many) -> at most so many.
Oracle = Callable[[int, int], list[int]]


@lru_cache(4096)
def _stream(prompt: tuple[int, ...], seed: int, vocab_size: int) -> list[int]:
    return fake_tokens(list(prompt), 128, vocab_size, seed)


def fake_oracle(vocab_size: int, table: BatchTable) -> Oracle:
    """The next tokens of the fake executor, up to the 128th of a request."""

    def next_tokens(row: int, count: int) -> list[int]:
        request = table.request[row]
        assert request is not None
        seed = choice_seed(request.seed, request.choice) if request.params.temperature > 0 else 0
        prompt = table.tokens.read(row, 0, request.num_prompt_tokens).tolist()
        first = int(table.num_tokens[row]) - request.num_prompt_tokens
        return _stream(tuple(prompt), seed, vocab_size)[first : first + count]

    return next_tokens


def speculative(num_tokens: int = 5, step_ns: tuple[int, ...] = ()) -> SpeculativeConfig:
    """Without step_ns drafts cost nothing, so each that is proposed is tried."""
    return SpeculativeConfig(method="ngram", num_speculative_tokens=num_tokens, step_ns=step_ns)


class Hostile:
    """A Proposer of one kind. "long": more tokens, and more of them counted, than it is asked for."""

    def __init__(self, kind: str, oracle: Oracle, vocab_size: int) -> None:
        self.num_asked = 0
        self._kind, self._oracle, self._vocab_size = kind, oracle, vocab_size
        self._rng = np.random.default_rng(7)

    def end(self, rows: Rows) -> None:
        pass

    def propose(self, rows: Ints, most: int) -> Proposals:
        self.num_asked += len(rows)
        width = most + 9 if self._kind == "long" else most
        token_ids = np.full((len(rows), width), self._vocab_size - 1, np.int32)
        counts = np.full(len(rows), width)
        for index, row in enumerate(rows.tolist()):
            right = self._oracle(row, width)
            token_ids[index, : len(right)] = right
            if self._kind == "wrong":
                token_ids[index] = (token_ids[index] + 1) % self._vocab_size
            elif self._kind == "random":
                wrong = self._rng.random(width) < 0.3
                token_ids[index, wrong] = self._rng.integers(self._vocab_size, size=int(wrong.sum()))
                counts[index] = self._rng.integers(width + 1)
        return Proposals(counts, token_ids, self._rng.integers(NUM_KINDS, size=len(rows)))


def use(scheduler: Scheduler, kind: str, oracle: Callable[[BatchTable], Oracle], vocab_size: int) -> Hostile:
    """Let the scheduler's only source of drafts be a hostile one, and return it."""
    hostile = Hostile(kind, oracle(scheduler.table), vocab_size)
    scheduler.speculation.proposers[:] = [hostile]
    return hostile
