"""DecodeGraphs: steps in which every row computes one token, as CUDA graphs: one launch instead of hundreds."""

from collections.abc import Callable

import torch

Results = tuple[torch.Tensor, torch.Tensor]

#: Rows of the largest graph; more are launched kernel by kernel, which takes less time than they run.
MAX_ROWS = 512


class DecodeGraphs:
    """One graph for each number of rows and of attention splits, both rounded up, captured when first needed.

    decode(inputs [2, B] int32, num_splits) -> hidden states and logits: all on the device, inputs of -1 being padding
    that reads and writes nothing. Used on CUDA alone.
    """

    def __init__(self, decode: Callable[[torch.Tensor, int], Results], device: torch.device) -> None:
        self._decode, self._device = decode, device
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor, Results]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @staticmethod
    def fits(num_rows: int) -> bool:
        return num_rows <= MAX_ROWS

    def __call__(self, inputs: torch.Tensor, num_splits: int) -> Results:
        """Results of these rows; they are overwritten by the next call."""
        num_rows = inputs.shape[1]
        key = padded_rows(num_rows), padded_splits(num_splits)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, static, (hidden, logits) = self._graphs[key]
        static[:, :num_rows] = inputs
        static[:, num_rows:] = -1
        graph.replay()
        return hidden[:num_rows], logits[:num_rows]

    def _capture(self, num_rows: int, num_splits: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, Results]:
        static = torch.full((2, num_rows), -1, dtype=torch.int32, device=self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(static, num_splits)  # compiles kernels and makes libraries' handles: no part of a graph
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = self._decode(static, num_splits)
        return graph, static, results


def padded_rows(num_rows: int) -> int:
    """1, 2, 4, and then multiples of 8."""
    return next((size for size in (1, 2, 4) if num_rows <= size), -(-num_rows // 8) * 8)


def padded_splits(num_splits: int) -> int:
    """The least power of two that is at least num_splits."""
    return 1 << max(0, num_splits - 1).bit_length()
