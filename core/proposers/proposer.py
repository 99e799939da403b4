"""Proposer: the interface of a source of drafts, that is, guesses of a row's next tokens."""

from typing import NamedTuple, Protocol

from ipc.tables.arrays import Int32s, Ints, Rows


class Proposals(NamedTuple):
    """Drafts of n rows. A wrong draft costs time, never a token."""

    counts: Ints  # [n] drafts of each row; 0: none
    token_ids: Int32s  # [n, most]; a row's entries after its count are meaningless
    kinds: Ints  # [n] from 0 to NUM_KINDS - 1: drafts of one kind are right about equally often


#: Number of kinds of drafts whose success is counted separately.
NUM_KINDS = 64
#: The kind of drafts offered by executors.
OFFERED = 0


class Proposer(Protocol):
    """A source of drafts. It must be a pure function of the table's history, because a replay asks it again."""

    def propose(self, rows: Ints, most: int) -> Proposals:
        """Return up to `most` drafts for each of these rows of the batch table. They follow the row's known tokens."""

    def end(self, rows: Rows) -> None:
        """Handle the end of these rows' requests. The table still has their tokens."""
