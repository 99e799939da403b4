"""DecodeGraphs: steps in which every row computes one token, as CUDA graphs: one launch instead of hundreds."""

from collections.abc import Callable

import torch

from ipc.rounding import round_up

#: Rows of the largest graph; more are launched kernel by kernel, which takes less time than they run.
MAX_ROWS = 512

#: (rows [B], positions [B], num_splits, hidden [B, width]): writes hidden states. All on the device, rows and positions
#: int32; -1 is padding, which reads and writes nothing else.
Decode = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], None]


class DecodeGraphs:
    """One graph for each number of rows and of attention splits, both rounded up, captured when first needed. The
    logits are no part of it: they are few launches, and every graph would keep a buffer of B x vocabulary for them.

    Graphs run one at a time, so they share their inputs, their result and the memory in between. Used on CUDA alone.
    """

    def __init__(self, decode: Decode, device: torch.device, num_rows: int, width: int) -> None:
        """num_rows: the most there can be; width: of a hidden state."""
        self._decode = decode
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        size = padded_rows(max(8, min(num_rows, MAX_ROWS)))  # of 8: both rows of inputs begin at 16 bytes
        self._inputs = torch.full((2, size), -1, dtype=torch.int32, device=device)
        self._hidden = torch.empty((size, width), dtype=torch.float32, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures: cuBLAS keeps a workspace for each stream that it has seen.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @staticmethod
    def fits(num_rows: int) -> bool:
        return num_rows <= MAX_ROWS

    def __call__(self, rows: torch.Tensor, positions: torch.Tensor, num_splits: int) -> torch.Tensor:
        """Hidden states [n, width] of these rows [n]; they are overwritten by the next call."""
        count = len(rows)
        size, splits = padded_rows(count), padded_splits(num_splits)
        graph = self._graphs.get((size, splits))
        if graph is None:
            graph = self._graphs[size, splits] = self._capture(size, splits)
        self._inputs[0, :count], self._inputs[1, :count] = rows, positions
        self._inputs[:, count:size] = -1
        graph.replay()
        return self._hidden[:count]

    def _capture(self, num_rows: int, num_splits: int) -> torch.cuda.CUDAGraph:
        self._inputs.fill_(-1)
        arguments = self._inputs[0, :num_rows], self._inputs[1, :num_rows], num_splits, self._hidden[:num_rows]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._decode(*arguments)  # compiles kernels, makes handles: no part of a graph
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            self._decode(*arguments)
        return graph


def padded_rows(num_rows: int) -> int:
    """1, 2, 4, and then multiples of 8."""
    return next((size for size in (1, 2, 4) if num_rows <= size), round_up(num_rows, 8))


def padded_splits(num_splits: int) -> int:
    """The least power of two that is at least num_splits."""
    return 1 << max(0, num_splits - 1).bit_length()
