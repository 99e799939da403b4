"""WindowCache and WindowForks: what a waiting request finds, where layers with a window have blocks of their own.

It needs the blocks of all tokens before its first one in the layers that see everything, and in the others those of the
window before that token. Where some of these are evicted, it finds fewer tokens.
"""

from collections import deque

import numpy as np

from core.batch.forks import Forks
from core.batch.prefix_cache import PrefixCache
from core.batch.request import NO_ROW, Request
from core.batch.table import BatchTable, Fork
from core.batch.window_host import WindowHost
from core.batch.window_table import WindowTable
from core.kv.block_pool import NULL_BLOCK
from core.kv.page_names import PageNames
from core.kv.page_pool import PagePool
from core.kv.page_room import PageRoom
from ipc.tables.arrays import Int32s, Ints
from ipc.tables.rounding import ceil_div


class WindowCache(PrefixCache):
    """A PrefixCache whose blocks have others beside them."""

    def __init__(self, table: BatchTable, pool: PagePool, enabled: bool, room: PageRoom) -> None:
        super().__init__(table, pool.names, enabled)
        self._found: PageNames = pool.names
        self._num_pages = pool.num_blocks - 1
        self._room = room
        self.host: WindowHost | None = None  # where it keeps anything

    def find(self, request: Request, *, needs_state: bool = True) -> tuple[Int32s, int]:
        """Return the blocks of the waiting request's first tokens that can be used, and the last one's content."""
        hits, content = super().find(request, needs_state=needs_state)
        count = self._num_usable(request, hits, content) if len(hits) else 0
        if count and not self.fits(request, hits[:count]):
            count = 0
        if count < len(hits):
            hits, content = hits[:count], int(self._found.content[hits[count - 1]]) if count else request.root
        return hits, content

    def beside(self, hits: Int32s, num_passed: int) -> Int32s:
        """Return the blocks of layers with a window that lie beside these found blocks, without the first ones."""
        return self._found.beside[hits[num_passed:]].astype(np.int32)

    def find_all(self, request: Request) -> tuple[Int32s, int]:
        """Return the blocks of the waiting request's first tokens, whatever lies beside them, and the last content."""
        return super().find(request)

    def _num_usable(self, request: Request, hits: Int32s, content: int) -> int:
        """Return the largest number of these found blocks that have all blocks of their window beside them, or on the
        host.

        What is copied back for a swapped request is not the host's.
        """
        if self.host is not None and request.swapped is None:
            return min(len(hits), self.host.num_usable(request, hits, content))
        return self._room.num_usable(self._found.beside[hits] != 0)

    def fits(self, request: Request, hits: Int32s) -> bool:
        """Return whether the request could ever end with these first blocks; their pages may have others', too."""
        room, count = self._room, len(hits)
        others = room.num_pages(request.max_computed_tokens, bool(request.choices))
        if count + others <= self._num_pages:
            return True
        pages = len(np.unique(hits // room.page_blocks))
        total = ceil_div(request.max_computed_tokens, self.block_size)
        return others + pages + ceil_div(total - count, room.page_blocks) - ceil_div(total, room.page_blocks) <= (
            self._num_pages
        )


class WindowForks(Forks):
    """Forks that take over the blocks of layers with a window, too."""

    def __init__(
        self,
        table: BatchTable,
        windows: WindowTable,
        pool: PagePool,
        prefix_cache: WindowCache,
        in_flight: deque[tuple[int, Ints, Ints]],
        room: PageRoom,
    ) -> None:
        super().__init__(table, pool, prefix_cache, in_flight)
        self._windows, self._cache, self._room = windows, prefix_cache, room
        self.kept_windows: list[tuple[list[Request], Int32s]] = []  # of the choices in `kept`, in their order

    def find(self, request: Request, hits: Int32s) -> Fork | None:
        """Return the prompt as a running choice has computed it, as Forks does."""
        fork = super().find(request, hits)
        if fork is None:
            return None
        row, _, _ = self._source(request)
        count = ceil_div(fork.num_tokens, self._block_size)
        if row == NO_ROW:
            (found,) = [blocks for choices, blocks in self.kept_windows if choices is request.choices]
        else:
            found = self._windows.blocks.read(row, 0, count)
        if not self._cache.fits(request, fork.blocks):
            return None  # its source is a fork, and so was that one's
        num_passed = self._room.num_passed(fork.num_tokens)
        if (found[num_passed:count] == NULL_BLOCK).any():
            return None  # its source has resumed with fewer
        return fork._replace(window_blocks=found[:count])

    def keep(self, request: Request) -> None:
        """Keep the prompt's blocks of a choice that ends, for those that start in the next plan; see drop()."""
        super().keep(request)
        windows, row = self._windows, request.row
        count = min(ceil_div(request.num_prompt_tokens, self._block_size), int(windows.num_blocks[row]))
        blocks = windows.blocks.read(row, 0, count)
        self._pool.hold(blocks[int(windows.num_released[row]) :])
        self.kept_windows.append((request.choices, blocks))

    def drop(self, choices: list[Request] | None = None) -> None:
        """Free the blocks that were kept, of all messages or of the one with these choices."""
        super().drop(choices)
        kept, self.kept_windows = self.kept_windows, []
        for owners, blocks in kept:
            if choices is None or owners is choices:
                held = blocks[blocks > 0]
                self._pool.free(held[::-1], self._in_flight[-1][0] if self._in_flight else None)
            else:
                self.kept_windows.append((owners, blocks))
