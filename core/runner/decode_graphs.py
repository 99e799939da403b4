"""DecodeGraphs: CUDA graphs for steps in which each row decodes one token: one launch instead of hundreds."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ipc.tables.rounding import round_up

#: Rows of the largest graph. Larger batches are launched kernel by kernel, because launching takes less time than
#: running.
MAX_ROWS = 512

#: The function that a graph captures: (rows [B], positions [B], shared [B] or None, common [1] or None, num_splits,
#: hidden [B, width]); it writes hidden. All tensors are on the device, and inputs are int32. Rows and positions of -1
#: are padding, which changes no table and no cache. shared, common: see TritonWork; shared is 1 for padding.
Decode = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, int, torch.Tensor],
    None,
]


class GraphSize(NamedTuple):
    """What a graph is captured for; see DecodeGraphs."""

    num_rows: int
    num_splits: int
    shares: bool = False  # tokens of a row share programs
    has_common: bool = False  # rows have leading splits in common


class DecodeGraphs:
    """One graph for each number of rows and of attention splits, both rounded up, captured when first needed.

    The logits are not part of a graph: they take few launches, and every graph would need a buffer of B x vocabulary
    for them. Graphs run one at a time, so they share their inputs, their result and the memory in between. This class
    needs CUDA.
    """

    def __init__(self, decode: Decode, device: torch.device, num_rows: int, width: int) -> None:
        """Allocate the shared buffers.

        decode: see Decode. num_rows: the maximum number of rows of a batch. width: length of a hidden state.
        """
        self._decode = decode
        self.captured: dict[GraphSize, torch.cuda.CUDAGraph] = {}
        # at least 8: all rows of inputs start at multiples of 16 bytes
        size = padded_rows(max(8, min(num_rows, MAX_ROWS)))
        self._inputs = torch.full((3, size), -1, dtype=torch.int32, device=device)
        self._common = torch.zeros(1, dtype=torch.int32, device=device)
        self._hidden = torch.empty((size, width), dtype=torch.float32, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all captures, because cuBLAS keeps a workspace for each stream that it has seen.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @staticmethod
    def fits(num_rows: int) -> bool:
        """Return whether there can be a graph for this many rows."""
        return num_rows <= MAX_ROWS

    def __call__(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        num_splits: int,
        shared: torch.Tensor | None = None,
        common: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [n, width] of these rows [n] at these positions [n].

        The next call overwrites the result. shared [n]: of a step with drafts. common [1]: of one whose rows have
        leading splits in common. For both the number of rows is rounded up to a power of two, to need few graphs.
        """
        count, is_plain = len(rows), shared is None and common is None
        num_rows = padded_rows(count) if is_plain else min(_power_of_2(count), self._inputs.shape[1])
        size = GraphSize(num_rows, padded_splits(num_splits), shared is not None, common is not None)
        graph = self.captured.get(size)
        if graph is None:
            graph = self.captured[size] = self._capture(size)
        self._inputs[0, :count], self._inputs[1, :count] = rows, positions
        if shared is not None:
            self._inputs[2, :count] = shared
        if common is not None:
            self._common.copy_(common)
        if count < num_rows:
            self._inputs[:2, count:num_rows] = -1
            self._inputs[2, count:num_rows] = 1
        graph.replay()
        return self._hidden[:count]

    def _capture(self, size: GraphSize) -> torch.cuda.CUDAGraph:
        self._inputs[:2] = -1
        self._inputs[2] = 1
        self._common.zero_()
        rows, positions, shared = (each[: size.num_rows] for each in self._inputs)
        decode = partial(
            self._decode,
            rows,
            positions,
            shared if size.shares else None,
            self._common if size.has_common else None,
            size.num_splits,
            self._hidden[: size.num_rows],
        )
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            decode()  # compiles kernels and creates handles, which must not happen during capture
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            decode()
        return graph


def padded_rows(num_rows: int) -> int:
    """Return num_rows rounded up to 1, 2, 4 or a multiple of 8."""
    return next((size for size in (1, 2, 4) if num_rows <= size), round_up(num_rows, 8))


def padded_splits(num_splits: int) -> int:
    """Return the smallest power of two that is at least num_splits."""
    return _power_of_2(num_splits)


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
