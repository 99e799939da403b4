"""DecodeGraphs: steps in which every row computes one token, as CUDA graphs: one launch instead of hundreds."""

from collections.abc import Callable
from typing import NamedTuple

import torch

#: Rows of the largest graph; more are launched kernel by kernel, which takes less time than they run.
MAX_ROWS = 512


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor  # [2, B] int32: rows and positions
    hidden: torch.Tensor  # [B, hidden]


class DecodeGraphs:
    """One graph for each number of rows and of attention splits, both rounded up, captured when first needed. The
    logits are no part of it: they are few launches, and every graph would keep a buffer of B x vocabulary for them.

    decode(rows [B], positions [B], num_splits) -> hidden states: all on the device, int32; -1 is padding, which reads
    and writes nothing. Used on CUDA alone.
    """

    def __init__(self, decode: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor], device: torch.device) -> None:
        self._decode, self._device = decode, device
        self._graphs: dict[tuple[int, int], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @staticmethod
    def fits(num_rows: int) -> bool:
        return num_rows <= MAX_ROWS

    def __call__(self, rows: torch.Tensor, positions: torch.Tensor, num_splits: int) -> torch.Tensor:
        """Hidden states of these rows; they are overwritten by the next call."""
        count = len(rows)
        key = padded_rows(count), padded_splits(num_splits)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, inputs, hidden = self._graphs[key]
        inputs[0, :count], inputs[1, :count] = rows, positions
        inputs[:, count:] = -1
        graph.replay()
        return hidden[:count]

    def _capture(self, num_rows: int, num_splits: int) -> _Captured:
        inputs = torch.full((2, num_rows), -1, dtype=torch.int32, device=self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(inputs[0], inputs[1], num_splits)  # compiles kernels, makes handles: no part of a graph
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = self._decode(inputs[0], inputs[1], num_splits)
        return _Captured(graph, inputs, hidden)


def padded_rows(num_rows: int) -> int:
    """1, 2, 4, and then multiples of 8."""
    return next((size for size in (1, 2, 4) if num_rows <= size), -(-num_rows // 8) * 8)


def padded_splits(num_splits: int) -> int:
    """The least power of two that is at least num_splits."""
    return 1 << max(0, num_splits - 1).bit_length()
