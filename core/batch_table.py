"""BatchTable: the running requests as a table, one row each, their state in NumPy columns.

Row numbers are stable while a request runs and are reused after it; `tenancy` tells two occupants of a row apart.
Token ids and block tables lie in paged pools addressed by the row.
"""

import numpy as np

from core.request import NO_ROW, Request
from ipc.paged_rows import Int32s, Ints, PagedRows

TOKENS_PER_PAGE = 256
BLOCKS_PER_PAGE = 64
FREE_ROW = -1


class BatchTable:
    """Only the scheduler writes here. A column's entry is meaningful only for rows in use.

    tenancy [rows] int64: number of the occupancy, never reused; FREE_ROW for a free row
    client, number, choice [rows]: where the outputs go
    num_tokens [rows]: prompt and known output tokens
    num_placeholders [rows]: tokens that steps in flight will sample
    num_prompt_tokens, num_computed_tokens [rows]: the latter is advanced by schedule(), before the step runs
    max_total_tokens [rows]: a request with so many tokens is finished
    min_total_tokens [rows]: below it nothing but the length ends a request
    num_blocks, num_hashed_blocks [rows]: blocks in the row's table; those whose content has a name
    ignore_eos, has_stop_ids [rows] bool
    """

    def __init__(self, num_rows: int) -> None:
        self.tenancy = np.full(num_rows, FREE_ROW, np.int64)
        self.client = np.zeros(num_rows, np.int64)
        self.number = np.zeros(num_rows, np.uint32)
        self.choice = np.zeros(num_rows, np.uint16)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_placeholders = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self.num_computed_tokens = np.zeros(num_rows, np.int64)
        self.max_total_tokens = np.zeros(num_rows, np.int64)
        self.min_total_tokens = np.zeros(num_rows, np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.num_hashed_blocks = np.zeros(num_rows, np.int64)
        self.ignore_eos = np.zeros(num_rows, np.bool_)
        self.has_stop_ids = np.zeros(num_rows, np.bool_)
        self.tokens = PagedRows(num_rows, TOKENS_PER_PAGE)
        self.blocks = PagedRows(num_rows, BLOCKS_PER_PAGE)
        self.request: list[Request | None] = [None] * num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._num_tenancies = 0

    def add(self, request: Request, num_computed_tokens: int, block_ids: Int32s, num_hashed_blocks: int) -> int:
        """Give the request a row; its tokens move into the table."""
        row = self._free_rows.pop()
        self.tenancy[row] = self._num_tenancies
        self._num_tenancies += 1
        self.client[row] = request.client
        self.number[row] = request.number
        self.choice[row] = request.choice
        self.num_tokens[row] = request.num_tokens
        self.num_placeholders[row] = 0
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed_tokens[row] = num_computed_tokens
        self.max_total_tokens[row] = request.max_total_tokens
        self.min_total_tokens[row] = request.num_prompt_tokens + request.params.min_tokens
        self.num_blocks[row] = len(block_ids)
        self.num_hashed_blocks[row] = num_hashed_blocks
        self.ignore_eos[row] = request.params.ignore_eos
        self.has_stop_ids[row] = bool(request.params.stop_token_ids)
        self.tokens.extend(row, 0, request.token_ids)
        self.blocks.extend(row, 0, block_ids)
        self.request[row] = request
        request.row = row
        return row

    def remove(self, row: int) -> Request:
        """Free the row; the request gets its tokens back. The caller has taken care of the blocks."""
        request = self.request[row]
        assert request is not None, f"row {row} is free"
        request.token_ids = self.tokens.read(row, 0, int(self.num_tokens[row]))
        request.row = NO_ROW
        self.tokens.clear(row)
        self.blocks.clear(row)
        self.tenancy[row] = FREE_ROW
        self.request[row] = None
        self._free_rows.append(row)
        return request

    def block_ids(self, row: int) -> Int32s:
        return self.blocks.read(row, 0, int(self.num_blocks[row]))

    def append_blocks(self, rows: Ints, counts: Ints, block_ids: Int32s) -> Ints:
        """counts[i] > 0 more blocks for rows[i], taken from block_ids in order; returns the row of each block."""
        starts = self.num_blocks[rows]
        self.blocks.ensure(rows, starts + counts)
        block_rows = np.repeat(rows, counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        self.blocks.set(block_rows, np.repeat(starts, counts) + np.arange(len(block_ids)) - first, block_ids)
        self.num_blocks[rows] += counts
        return block_rows

    def append_tokens(self, rows: Ints, token_ids: Int32s) -> None:
        """One sampled token for each of these rows."""
        lengths = self.num_tokens[rows]
        self.tokens.ensure(rows, lengths + 1)
        self.tokens.set(rows, lengths, token_ids)
        self.num_tokens[rows] += 1
        self.num_placeholders[rows] -= 1

    def check_integrity(self, running: Ints) -> None:
        """AssertionError with the numbers when a column contradicts another or the list of running rows."""
        used = np.flatnonzero(self.tenancy != FREE_ROW)
        assert sorted(running.tolist()) == used.tolist(), f"running {running} but rows in use are {used}"
        assert len(used) + len(self._free_rows) == len(self.tenancy), f"{len(used)} used, {len(self._free_rows)} free"
        for row in used.tolist():
            request = self.request[row]
            assert request is not None, f"row {row} is in use and has no request"
            assert request.row == row, f"the request of row {row} says row {request.row}"
        known = self.num_tokens[used] + self.num_placeholders[used]
        assert (self.num_computed_tokens[used] <= known).all(), f"computed {self.num_computed_tokens[used]} of {known}"
        assert (self.num_tokens[used] < self.max_total_tokens[used]).all(), "a finished request is still running"
        assert (self.num_placeholders[used] >= 0).all(), f"placeholders {self.num_placeholders[used]}"
        assert (self.num_hashed_blocks[used] <= self.num_blocks[used]).all(), "more names than blocks"
