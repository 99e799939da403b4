"""PrefixCache: whole KV blocks, found again by their content. The names are explained in core/kv/block_names.py."""

import numpy as np

from core.batch.kept_states import KeptStates
from core.batch.request import Request
from core.batch.table import BatchTable, RequestStart
from core.kv.block_names import BlockNames, block_key, hash_blocks
from ipc.tables.arrays import NO_INT32S, Int32s, Ints, Rows


class PrefixCache:
    """Names the blocks of running rows and finds the blocks of waiting requests."""

    def __init__(self, table: BatchTable, names: BlockNames, enabled: bool) -> None:
        self._table = table
        self._names = names
        self.block_size = names.block_size
        self._shift = names.block_size.bit_length() - 1  # block sizes are powers of two
        self.is_enabled = enabled
        self.kept_states: KeptStates | None = None  # of a model with recurrent layers

    def prepare(self, request: Request) -> None:
        """Hash the whole blocks of a request that will wait: once, although many steps may look it up."""
        if self.is_enabled and (count := request.num_tokens // self.block_size) > (have := len(request.block_hashes)):
            token_ids = request.token_ids[have * self.block_size : count * self.block_size]
            request.block_hashes.extend(hash_blocks(token_ids.reshape(-1, self.block_size)).tolist())
            if not have:
                request.first_key = block_key(request.root, request.block_hashes[0])

    def find(self, request: Request, *, needs_state: bool = True) -> tuple[Int32s, int]:
        """Return the blocks that hold the waiting request's first tokens, and the content number of the last one.

        The request's last token is never among these: it must be computed. A request that needs its whole prompt
        computed gets no blocks. needs_state: with recurrent layers, the state behind the last block must be kept.
        """
        if request.first_key not in self._names.block_of_key or request.needs_whole_prompt:
            return NO_INT32S, request.root
        count = (len(request.token_ids) - 1) // self.block_size
        token_ids = request.token_ids[: count * self.block_size].reshape(count, self.block_size)
        blocks, content = self._names.find(request.root, token_ids, request.block_hashes[:count])
        if self.kept_states is None or not needs_state:
            return blocks, content
        count = self.kept_states.reachable(blocks)
        return blocks[:count], int(self._names.content[blocks[count - 1]]) if count else request.root

    def name_full_blocks(self, rows: Rows, ends: Ints) -> None:
        """Name the blocks whose tokens are all known, and computed by the end of the step being planned.

        ends [n]: computed tokens of the rows after that step. A request that finds the blocks runs in this step or a
        later one, and every layer stores the step's K and V before it reads.
        """
        if not self.is_enabled:
            return
        table = self._table
        more = (np.minimum(ends, table.num_tokens[rows]) >> self._shift) - table.num_named_blocks[rows]
        full = (more > 0).nonzero()[0]
        if not len(full):
            return
        rows, more = rows[full], more[full]
        named = table.num_named_blocks[rows]
        one = more == 1
        if np.count_nonzero(one) == len(rows):
            self._name_one_each(rows, named)
            return
        self._name_one_each(rows[one], named[one])
        for row, start, count in zip(rows[~one].tolist(), named[~one].tolist(), more[~one].tolist(), strict=True):
            blocks = table.blocks.read(row, start, start + count)
            tokens = table.tokens.read(row, start * self.block_size, (start + count) * self.block_size)
            tokens = tokens.reshape(count, self.block_size)
            hashes = hash_blocks(tokens).tolist()
            table.content[row] = self._names.name_run(blocks, int(table.content[row]), tokens, hashes)
            table.num_named_blocks[row] = start + count

    def name_starts(self, starts: list[RequestStart]) -> None:
        """Name the full blocks of these requests, after the hits and those copied back, which have names already.

        No two requests may have the same first block, unless it is a hit; then no two have the same next block.
        """
        if not self.is_enabled:
            return
        size, shift, names = self.block_size, self._shift, self._names
        fresh: list[RequestStart] = []  # starts whose next content is new
        blocks, tokens, lengths = [], [], []
        for start in starts:
            request, named = start.request, start.num_hits + start.num_loaded
            full = start.num_named_blocks = (start.num_computed_tokens + start.num_tokens) >> shift
            if full == named:
                continue
            block_ids, token_ids = start.block_ids[named:full], request.token_ids[named * size : full * size]
            key = block_key(start.content, request.block_hashes[named]) if named else request.first_key
            if key in names.block_of_key:
                hashes = request.block_hashes[named:full]
                start.content = names.name_run(block_ids, start.content, token_ids.reshape(-1, size), hashes)
                continue
            fresh.append(start)
            blocks.append(block_ids)
            tokens.append(token_ids)
            lengths.append(full - named)
        if fresh:
            parents = np.array([start.content for start in fresh])
            token_ids = np.concatenate(tokens).reshape(-1, size)
            lasts = names.name_runs(np.concatenate(blocks), np.array(lengths), parents, token_ids)
            for start, last in zip(fresh, lasts.tolist(), strict=True):
                start.content = last

    def _name_one_each(self, rows: Rows, indices: Ints) -> None:
        """Name one block of each row: the one at indices[i] in the table of rows[i]."""
        table, size = self._table, self.block_size
        token_ids = table.tokens.get_runs(rows, indices * size, size)
        blocks = table.blocks.get(rows, indices)
        table.content[rows] = self._names.name(blocks, table.content[rows], token_ids)
        table.num_named_blocks[rows] = indices + 1
