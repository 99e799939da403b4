"""GivenDrafts: drafts that are known from the start: the tokens that an answer is said to have, to be verified."""

from collections.abc import Sequence

import numpy as np

from core.batch.table import BatchTable
from core.proposers.proposer import Proposals
from ipc.tables.arrays import Int32s, Ints, Rows

#: (client, request number, choice)
Answer = tuple[int, int, int]


class GivenDrafts:
    """A Proposer of the tokens that were given for each answer."""

    def __init__(self, table: BatchTable) -> None:
        self._table = table
        self._given: dict[Answer, Int32s] = {}
        self._after_prompt: set[Answer] = set()

    def give(self, answer: Answer, token_ids: Sequence[int], *, after_prompt: bool) -> None:
        """Propose these tokens for an answer, from its first token on.

        after_prompt: in the step that ends the prompt, too, and not only after it.
        """
        self._given[answer] = np.array(token_ids, np.int32)
        if after_prompt:
            self._after_prompt.add(answer)

    def forget(self, answer: Answer) -> None:
        """Propose no more tokens for an answer."""
        self._given.pop(answer, None)
        self._after_prompt.discard(answer)

    def propose(self, rows: Ints, most: int) -> Proposals:
        """Return up to `most` of the given tokens that follow those that each row has."""
        table, counts = self._table, np.zeros(len(rows), np.int64)
        token_ids = np.zeros((len(rows), most), np.int32)
        firsts = (table.num_tokens[rows] - table.num_prompt_tokens[rows]).tolist()
        addresses = zip(*(column.tolist() for column in table.address(rows)), strict=True)
        for index, (first, answer) in enumerate(zip(firsts, addresses, strict=True)):
            given = self._given.get(answer)
            if given is not None and (first > 0 or answer in self._after_prompt):
                drafts = given[first : first + most]
                counts[index] = len(drafts)
                token_ids[index, : len(drafts)] = drafts
        return Proposals(counts, token_ids, np.ones(len(rows), np.int64))

    def end(self, rows: Rows) -> None:
        """Do nothing: who gave the drafts forgets them."""
