"""GraphPool: captures CUDA graphs that share the memory in between."""

from collections.abc import Callable

import torch


class GraphPool:
    """The memory and the stream of a runner's graphs, which run one at a time. It needs CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all captures, because cuBLAS keeps a workspace for each stream that it has seen.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return a graph of what this launches. It is launched once before, and does not change any table then."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            launch()  # compiles kernels and creates handles, which must not happen during capture
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(), which waits for the device and returns all unused memory to it, each time.
        with torch.cuda.stream(self._stream):
            # Another thread, such as NCCL's, may ask for events at the same time.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            launch()
            graph.capture_end()
        return graph
