"""BatchTable: the running requests as a table, one row each, with their state in NumPy columns.

Row numbers are stable while a request runs and are reused after it. `tenancy` distinguishes two occupants of a row.
Token ids and block tables are in paged pools addressed by the row.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from core.batch.block_table import BlockTable
from core.batch.request import NO_ROW, Request
from ipc.tables.arrays import NO_INT32S, NO_INTS, Int32s, Ints, Rows, TokenIds
from ipc.tables.columns import column
from ipc.tables.paged_rows import PagedRows


class Fork(NamedTuple):
    """What a starting request takes over from a running choice of its message."""

    blocks: Int32s  # blocks to share
    copied_block: int  # the block with the tokens after those of `blocks`; NULL_BLOCK: none
    num_tokens: int  # number of tokens in all of these
    num_forked_tokens: int  # how many of them are not in the prefix cache
    others: tuple[Int32s, ...] = ()  # for each further kind of layer: all blocks of the source for these tokens


class OtherStart(msgspec.Struct, eq=False, gc=False):
    """The blocks of a further kind of layer that a request starts with. The kind has a window."""

    num_passed: int  # number of leading blocks that no token to compute reads; the row has none for them
    hits: Int32s  # the blocks after them, found or shared; NULL_BLOCK: it is copied back from the host
    leads: Ints = NO_INTS  # for blocks that are copied back: the first slot of each on the host
    block_ids: Int32s = NO_INT32S  # all blocks from the first position on; NULL_BLOCK for those that are passed

    @property
    def num_hits(self) -> int:
        """Return how many blocks were found or are shared."""
        return len(self.hits) - len(self.leads)

    @property
    def found(self) -> Int32s:
        """Return the blocks that were found or are shared."""
        return self.hits[self.hits > 0] if len(self.leads) else self.hits


class RequestStart(msgspec.Struct, eq=False, gc=False):
    """How a waiting request starts: first what it needs, then the blocks that it gets."""

    request: Request
    hits: Int32s  # blocks found in the prefix cache, or shared with another choice of its message
    num_hits: int
    content: int  # content number of the last block that has a name
    num_computed_tokens: int  # tokens in the hits and a forked block, or in the host's copy
    num_missing_tokens: int  # to compute, in this step and later
    num_tokens: int  # to compute in this step; an upper bound until admission has cut it
    num_blocks: int  # including hits
    is_reserved: bool  # all num_blocks are allocated at the start
    num_lacking: int = 0  # blocks to allocate for num_blocks; it starts only if all of them are available
    num_given: int = 0  # blocks in its table at the start, including hits; enough for this step's tokens
    num_taken: int = 0  # blocks allocated for these
    block_ids: Int32s = NO_INT32S
    num_named_blocks: int = 0
    fork: Fork | None = None
    #: Slots of the blocks after the hits, which are copied back from the host. None: no blocks; see also
    #: OtherStart.leads.
    host_slots: Int32s | None = None
    num_loaded: int = 0  # number of these
    swapped_state: int | None = None  # slot of the recurrent state of a swapped request
    others: list[OtherStart] = []  # one per further kind of layer; Batch.lacking_of() adds them


TOKENS_PER_PAGE = 256
FREE_ROW = -1


class BatchTable(BlockTable):
    """The state of running requests, including their blocks of the first kind of layer. Only the scheduler writes it.

    A column's entry is only meaningful for rows in use.
    """

    tenancy: Ints = column(FREE_ROW)  # number of the occupancy, never reused
    client: Ints = column()  # with number and choice: the destination of the outputs
    party: Ints = column()  # who is charged under policy fair
    number: Ints = column()
    choice: Ints = column()
    num_tokens: Ints = column()  # prompt and known output tokens
    #: Tokens that steps in flight will sample, one per step: num_computed_tokens + 1 - num_tokens if that is positive.
    #: A step with drafts of the row counts none, so the row gets no tokens until its result is known.
    num_placeholders: Ints = column()
    num_prompt_tokens: Ints = column()
    num_computed_tokens: Ints = column()  # advanced by schedule(), before the step runs
    num_computed_before: Ints = column()  # the most tokens computed when it was preempted
    max_total_tokens: Ints = column()  # a request with this many tokens is finished
    max_computed_tokens: Ints = column()  # the most of them that it can ever compute
    min_total_tokens: Ints = column()  # below it, only the length ends a request
    num_named_blocks: Ints = column()  # of num_blocks: how many have a name for their content
    content: Ints = column()  # content number of the last named block; see core/kv/block_names.py
    rank: Ints = column()  # with serial and level: the request's place in the order of the scheduling policy
    serial: Ints = column()
    level: Ints = column()
    ignore_eos: Ints = column()  # 0 or 1
    has_stop_ids: Ints = column()  # 0 or 1
    num_in_draft: Ints = column()  # drafts in the step in flight that has drafts of this row
    num_drafted: Ints = column()  # drafts that steps have verified for the request, and how many of them became tokens
    num_accepted: Ints = column()
    keeps_blocks: Ints = column()  # 0 or 1: it frees no block before its end, because other choices may start with them

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.tokens = PagedRows(num_rows, TOKENS_PER_PAGE)
        self.request: list[Request | None] = [None] * num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._num_tenancies = 0

    def add(self, starts: list[RequestStart]) -> Ints:
        """Give these requests rows, move their tokens into the table, and return the rows."""
        free, entries, tenancy = self._free_rows, list[int](), self._num_tenancies
        numbers = free[: -len(starts) - 1 : -1]
        del free[-len(starts) :]
        for row, start in zip(numbers, starts, strict=True):
            start.request.row = row
            self.request[row] = start.request
            entries += _entries(start, tenancy)
            tenancy += 1
        rows = np.array(numbers)
        self.set_columns(rows, entries)
        self._num_tenancies = tenancy
        self.tokens.fill(rows, [start.request.token_ids for start in starts])
        self.blocks.fill(rows, [start.block_ids for start in starts])
        return rows

    def remove(self, rows: Rows) -> list[Request]:
        """Free the rows and return their requests.

        The caller frees the blocks first, and reads the tokens of requests that resume later.
        """
        removed, numbers = [], rows.tolist()
        for row in numbers:
            request = self.request[row]
            assert request is not None, f"row {row} is free"
            request.row = NO_ROW
            self.request[row] = None
            removed.append(request)
        self.tokens.clear_all(rows)
        self.blocks.clear_all(rows)
        self.tenancy[rows] = FREE_ROW
        self._free_rows.extend(numbers)
        return removed

    def token_ids(self, row: int) -> Int32s:
        """Return the row's prompt and output so far, int32 [num_tokens]."""
        return self.tokens.read(row, 0, int(self.num_tokens[row]))

    def address(self, rows: Rows) -> tuple[Ints, Ints, Ints]:
        """Return (client, number, choice) of each row."""
        return self.client[rows], self.number[rows], self.choice[rows]

    def num_output_tokens(self, request: Request) -> int:
        """Return the number of output tokens of a request that runs or waits."""
        if request.row == NO_ROW:
            return request.num_output_tokens
        return int(self.num_tokens[request.row]) - request.num_prompt_tokens

    def append_tokens(self, rows: Rows, token_ids: TokenIds, counts: Ints | None = None) -> Ints:
        """Append one sampled token to each row, or counts[i] > 0 tokens, row after row. Return the new lengths.

        A step counts one placeholder for a row that samples. Tokens after the first are known but not computed. So a
        step in flight that was to sample after the first token samples nothing, and its placeholder is taken back too.
        """
        lengths = self.num_tokens[rows]
        if counts is not None:
            return self._append_runs(rows, lengths, counts, token_ids)
        longer: Ints = lengths + 1
        self.tokens.append(rows, lengths, token_ids)
        self.num_tokens[rows] = longer
        self.num_placeholders[rows] -= 1
        return longer

    def _append_runs(self, rows: Rows, lengths: Ints, counts: Ints, token_ids: TokenIds) -> Ints:
        longer: Ints = lengths + counts
        self.tokens.ensure(rows, longer)
        self.tokens.set_runs(rows, lengths, counts, token_ids)
        self.num_tokens[rows] = longer
        # Drafts of a step in flight: those of this step have been counted. After several tokens they are too late.
        self.num_in_draft[rows[counts > 1]] = 0
        uncounted = (self.num_in_draft[rows] > 0).astype(np.int64)
        self.num_placeholders[rows] = np.maximum(self.num_computed_tokens[rows] + 1 - longer - uncounted, 0)
        return longer

    def check_integrity(self, running: Ints) -> None:
        """Check the columns against each other and the running rows. Errors: AssertionError with the numbers."""
        self.check_columns()
        used = np.flatnonzero(self.tenancy != FREE_ROW)
        assert sorted(running.tolist()) == used.tolist(), f"running {running} but rows in use are {used}"
        assert len(used) + len(self._free_rows) == len(self.tenancy), f"{len(used)} used, {len(self._free_rows)} free"
        for row in used.tolist():
            request = self.request[row]
            assert request is not None, f"row {row} is in use and has no request"
            assert request.row == row, f"the request of row {row} has row {request.row}"
            parent = int(self.content[row])
            assert self.num_named_blocks[row] or parent == request.root, (
                f"row {row} begins after {parent}, not its root"
            )
        lengths = self.num_tokens, self.num_placeholders, self.num_computed_tokens, self.num_in_draft
        numbers = self.num_blocks, self.num_named_blocks, self.num_released, self.keeps_blocks
        columns = (values[used].tolist() for values in (*lengths, self.max_total_tokens, *numbers))
        for row, *values in zip(used.tolist(), *columns, strict=True):
            tokens, placeholders, computed, in_draft, most, blocks, named, released, keeps_blocks = values
            assert computed <= tokens + placeholders, f"row {row}: computed {computed} of {tokens} + {placeholders}"
            expected = max(0, computed + 1 - tokens - (in_draft > 0))
            assert placeholders == expected, f"row {row}: {placeholders} placeholders are not {expected}"
            assert tokens < most, f"row {row} is finished and still running"
            assert placeholders >= 0, f"row {row}: {placeholders} placeholders"
            assert named <= blocks, f"row {row} has {named} names for {blocks} blocks"
            assert released <= blocks, f"row {row} has given back {released} of {blocks} blocks"
            assert not (keeps_blocks and released), f"row {row} must keep its blocks but lacks {released}"


def _entries(start: RequestStart, tenancy: int) -> tuple[int, ...]:
    """Return the values of a starting request's row, in the order of the table's columns (compared by a test)."""
    request = start.request
    params, num_prompt_tokens = request.sampling, request.num_prompt_tokens
    min_tokens, ignores_eos, has_stop_ids = 0, False, False  # a pooling request samples no token
    if params is not None:
        min_tokens, ignores_eos, has_stop_ids = params.min_tokens, params.ignore_eos, bool(params.stop_token_ids)
    return (
        start.num_given,
        0,
        tenancy,
        request.client,
        request.party,
        request.number,
        request.choice,
        len(request.token_ids),
        0,
        num_prompt_tokens,
        start.num_computed_tokens,
        request.num_computed_before,
        request.max_total_tokens,
        request.max_computed_tokens,
        num_prompt_tokens + min_tokens,
        start.num_named_blocks,
        start.content,
        request.rank,
        request.serial,
        request.level,
        ignores_eos,
        has_stop_ids,
        0,
        request.num_drafted,
        request.num_accepted,
        bool(request.choices),
    )
