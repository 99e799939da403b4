"""Proposer: the interface of a source of drafts, which are guesses of a row's next tokens."""

from typing import NamedTuple, Protocol

from ipc.tables.arrays import Int32s, Ints, Rows


class Proposals(NamedTuple):
    """Drafts of n rows. A wrong draft costs time, never a token."""

    counts: Ints  # [n] drafts of each row; 0: none
    token_ids: Int32s  # [n, most]; a row's entries after its count mean nothing
    kinds: Ints  # [n] from 0 to NUM_KINDS - 1: drafts of one kind are about equally often right


#: Kinds of drafts for which a proposer's success is counted apart.
NUM_KINDS = 64
#: The kind of the drafts that executors offer.
OFFERED = 0


class Proposer(Protocol):
    """A source of drafts. It must be a pure function of the tables' history, since a replay asks it again."""

    def propose(self, rows: Ints, most: int) -> Proposals:
        """Return up to `most` drafts of each of these rows of the batch table; they follow the row's known tokens."""

    def end(self, rows: Rows) -> None:
        """Learn that the requests of these rows end now. The table still has their tokens."""
