"""NewBlocks: the blocks that running rows get in the step being planned."""

import numpy as np

from ipc.tables.arrays import NO_INTS, BlockIds, Rows


class NewBlocks:
    """Columns of (row, block). The blocks of one row are neighbours, in the order of its table.

    rows, ids [m]: new blocks of running rows. window_rows, window_ids [n]: new blocks of running rows and of those that
    start, for layers with a window, where these layers have blocks of their own.
    """

    def __init__(self) -> None:
        self.rows: Rows = NO_INTS
        self.ids: BlockIds = NO_INTS
        self.window_rows: Rows = NO_INTS
        self.window_ids: BlockIds = NO_INTS

    def add(self, rows: Rows, ids: BlockIds) -> None:
        """Add new blocks of running rows."""
        if len(self.rows):
            rows, ids = _merged(self.rows, self.ids, rows, ids)
        self.rows, self.ids = rows, ids

    def add_windows(self, rows: Rows, ids: BlockIds) -> None:
        """Add new blocks for layers with a window."""
        self.window_rows, self.window_ids = _merged(self.window_rows, self.window_ids, rows, ids)

    def drop(self, row: int) -> None:
        """Remove the new blocks of a row that is preempted."""
        kept = self.rows != row
        self.rows, self.ids = self.rows[kept], self.ids[kept]
        if len(self.window_rows):
            self.drop_windows([row])

    def drop_windows(self, rows: list[int]) -> None:
        """Remove the new blocks of these rows for layers with a window."""
        kept = ~np.isin(self.window_rows, rows)
        self.window_rows, self.window_ids = self.window_rows[kept], self.window_ids[kept]


def _merged(rows: Rows, ids: BlockIds, more_rows: Rows, more_ids: BlockIds) -> tuple[Rows, BlockIds]:
    merged = np.concatenate([rows, more_rows])
    order = np.argsort(merged, kind="stable")
    return merged[order], np.concatenate([ids, more_ids])[order]
