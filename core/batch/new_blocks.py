"""NewBlocks: the blocks that running rows get in the step being planned."""

import numpy as np

from ipc.tables.arrays import NO_INTS, BlockIds, Rows


class NewBlocks:
    """Columns of (row, block). The blocks of one row are neighbours, in the order of its table.

    rows, ids [m]: new blocks of the first kind of layer, of running rows, and of starting ones those for drafts.
    others: (rows [n], ids [n]) of each further kind, of running rows and starting ones. Empty if there are none.
    """

    def __init__(self) -> None:
        self.rows: Rows = NO_INTS
        self.ids: BlockIds = NO_INTS
        self.others: list[tuple[Rows, BlockIds]] = []

    def add(self, rows: Rows, ids: BlockIds) -> None:
        """Add new blocks of rows."""
        if len(self.rows):
            rows, ids = _merged(self.rows, self.ids, rows, ids)
        self.rows, self.ids = rows, ids

    def add_other(self, number: int, rows: Rows, ids: BlockIds) -> None:
        """Add new blocks of a further kind of layer."""
        while len(self.others) <= number:
            self.others.append((NO_INTS, NO_INTS))
        self.others[number] = _merged(*self.others[number], rows, ids)

    def drop(self, row: int) -> None:
        """Remove the new blocks of a row that is preempted."""
        kept = self.rows != row
        self.rows, self.ids = self.rows[kept], self.ids[kept]
        self.drop_others([row])

    def drop_others(self, dropped: list[int]) -> None:
        """Remove the new blocks of these rows in further kinds of layers."""
        for number, (rows, ids) in enumerate(self.others):
            kept = ~np.isin(rows, dropped)
            self.others[number] = rows[kept], ids[kept]


def _merged(rows: Rows, ids: BlockIds, more_rows: Rows, more_ids: BlockIds) -> tuple[Rows, BlockIds]:
    merged = np.concatenate([rows, more_rows])
    order = np.argsort(merged, kind="stable")
    return merged[order], np.concatenate([ids, more_ids])[order]
