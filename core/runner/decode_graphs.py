"""DecodeGraphs: CUDA graphs for steps in which each row decodes one token: one launch instead of hundreds."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from core.runner.graph_pool import GraphPool
from ipc.tables.rounding import ceil_div, round_up

#: Rows of the largest graph. Larger batches are launched kernel by kernel, because launching takes less time than
#: running.
MAX_ROWS = 512


class Drafted(NamedTuple):
    """What a decode step with drafts has in addition, int32 on the device. A row's tokens are adjacent."""

    shared: torch.Tensor  # [B] see TritonWork; 1 for padding
    saves: torch.Tensor  # [B] see DeviceStates; -1 for padding, and everywhere if the model has no recurrent states


#: The function that a graph captures: (rows [B], positions [B], drafted or None, common [1] or None, num_splits, hidden
#: [B, width]); it writes hidden. All tensors are on the device, and inputs are int32. Rows and positions of -1 are
#: padding, which changes no table and no cache. common: see TritonWork.
Decode = Callable[
    [torch.Tensor, torch.Tensor, Drafted | None, torch.Tensor | None, int, torch.Tensor],
    None,
]


class GraphSize(NamedTuple):
    """What a graph is captured for; see DecodeGraphs."""

    num_rows: int
    num_splits: int
    shares: bool = False  # tokens of a row share programs
    has_common: bool = False  # rows have leading splits in common


class DecodeGraphs:
    """One graph for each number of rows and of attention splits, both rounded up.

    capture_all() captures them before the first request. Later steps of other sizes are launched kernel by kernel. The
    logits are not part of a graph: they take few launches, and every graph would need a buffer of B x vocabulary
    for them. Graphs run one at a time, so they share their inputs, their result and the memory in between. This class
    needs CUDA.
    """

    def __init__(
        self,
        decode: Decode,
        device: torch.device,
        num_rows: int,
        width: int,
        *,
        most_splits: int = 1 << 20,
        pool: GraphPool | None = None,
    ) -> None:
        """Allocate the shared buffers.

        decode: see Decode. num_rows: the maximum number of rows of a batch. width: length of a hidden state.
        most_splits: those of the longest context. pool: None = one of its own.
        """
        self._decode, self._most_splits = decode, most_splits
        self._is_complete = False
        self.captured: dict[GraphSize, torch.cuda.CUDAGraph] = {}
        # at least 8: all rows of inputs start at multiples of 16 bytes
        size = padded_rows(max(8, min(num_rows, MAX_ROWS)))
        self._inputs = torch.full((4, size), -1, dtype=torch.int32, device=device)
        self._common = torch.zeros(1, dtype=torch.int32, device=device)
        self._hidden = torch.empty((size, width), dtype=torch.float32, device=device)
        self._pool = pool or GraphPool(device)

    def sizes(self, num_rows: int, num_drafts: int) -> list[GraphSize]:
        """Return the sizes of steps of up to num_rows rows, which may have up to num_drafts drafts; largest first.

        The first graphs take most of the memory that all others then share.
        """
        splits = {self._splits(count) for count in range(1, self._most_splits + 1)}
        plain = {padded_rows(count) for count in range(1, min(num_rows, MAX_ROWS) + 1)}
        coarse = {self._power_of_2(count) for count in range(2, min(num_rows + num_drafts, MAX_ROWS) + 1)}
        sizes = {GraphSize(rows, count) for rows in plain for count in splits}
        for rows in coarse:
            if num_drafts:
                sizes |= {GraphSize(rows, count, shares=True) for count in splits}
            if rows <= self._power_of_2(num_rows):
                sizes |= {GraphSize(rows, count, has_common=True) for count in splits - {1}}
        return sorted(sizes, reverse=True)

    def capture_all(self, sizes: Iterable[GraphSize]) -> None:
        """Capture graphs of these sizes, in their order. None is captured afterwards."""
        for size in sizes:
            self.captured[size] = self._capture(size)
        self._is_complete = True

    def size_of(self, num_rows: int, num_splits: int, *, shares: bool = False, has_common: bool = False) -> GraphSize:
        """Return the size of the graph that a step needs."""
        rows = self._power_of_2(num_rows) if shares or has_common else padded_rows(num_rows)
        return GraphSize(rows, self._splits(num_splits), shares, has_common)

    def fits(self, size: GraphSize) -> bool:
        """Return whether there is, or can be, a graph of this size."""
        return size in self.captured or (size.num_rows <= MAX_ROWS and not self._is_complete)

    def _splits(self, num_splits: int) -> int:
        return min(padded_splits(num_splits), self._most_splits)

    def _power_of_2(self, num_rows: int) -> int:
        return min(1 << max(0, num_rows - 1).bit_length(), max(num_rows, self._inputs.shape[1]))

    def __call__(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        num_splits: int,
        drafted: Drafted | None = None,
        common: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [n, width] of these rows [n] at these positions [n].

        The next call overwrites the result. drafted: of a step with drafts. common [1]: of one whose rows have leading
        splits in common. For both the number of rows is rounded up to a power of two, to need few graphs.
        """
        count = len(rows)
        size = self.size_of(count, num_splits, shares=drafted is not None, has_common=common is not None)
        num_rows, graph = size.num_rows, self.captured.get(size)
        if graph is None:
            graph = self.captured[size] = self._capture(size)
        self._inputs[0, :count], self._inputs[1, :count] = rows, positions
        if drafted is not None:
            self._inputs[2, :count], self._inputs[3, :count] = drafted
        if common is not None:
            self._common.copy_(common)
        if count < num_rows:
            self._inputs[:2, count:num_rows] = -1
            self._inputs[2, count:num_rows] = 1
            self._inputs[3, count:num_rows] = -1
        graph.replay()
        return self._hidden[:count]

    def _capture(self, size: GraphSize) -> torch.cuda.CUDAGraph:
        self._inputs.fill_(-1)
        self._inputs[2] = 1
        self._common.zero_()
        rows, positions, *drafted = (each[: size.num_rows] for each in self._inputs)
        decode = partial(
            self._decode,
            rows,
            positions,
            Drafted(*drafted) if size.shares else None,
            self._common if size.has_common else None,
            size.num_splits,
            self._hidden[: size.num_rows],
        )
        return self._pool.capture(decode)


#: Up to how many rows sizes are multiples of which number: padding costs little, and few graphs are captured soon.
_STEPS = {64: 8, 256: 16, MAX_ROWS: 32}


def padded_rows(num_rows: int) -> int:
    """Return num_rows rounded up to 1, 2, 4, or a multiple of 8, of 16 from 64 on, and of 32 from 256 on."""
    if num_rows <= 4:
        return 1 << (num_rows - 1).bit_length()
    return round_up(num_rows, next((step for most, step in _STEPS.items() if num_rows <= most), 32))


def padded_splits(num_splits: int) -> int:
    """Return the smallest power of four that is at least num_splits. A split beyond a context's end takes no time."""
    return 1 << 2 * ceil_div(max(0, num_splits - 1).bit_length(), 2)
