"""The blocks of a device's KV cache, and of the host's pool next to it, for code that accesses them between steps."""

from collections.abc import Callable

import torch

from core.execution.shared_blocks import BlockMemory, SharedBlocks
from kernels.triton.kv_cache import TritonKVCache


class DeviceBlocks:
    """The blocks of a KV cache in device memory, which are read as copies in host memory.

    The copies are made on a stream of their own, so that they wait for no step, and no step for them.
    """

    def __init__(self, cache: TritonKVCache) -> None:
        self._layers = cache.layers
        device = cache.layers[0].device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes of one block."""
        return sum(layer[0].nbytes for layer in self._layers)

    def views(self, *blocks: int) -> list[memoryview]:
        """Return the parts of each block, block after block, as they are now."""
        with torch.cuda.stream(self._stream):
            parts = [layer[block].to("cpu", copy=True) for block in blocks for layer in self._layers]
        return [memoryview(part.flatten().view(torch.uint8).numpy().data) for part in parts]


def shared_device_blocks(cache: TritonKVCache, pool: TritonKVCache) -> SharedBlocks:
    """Return the blocks of a device's cache and of its pool in host memory, to be accessed by another thread.

    When a step's orders are given, the step and its copies between the two have been launched but may not have ended.
    """
    arrays = [layer.flatten(1).view(torch.uint8).numpy() for layer in pool.layers]
    return SharedBlocks(DeviceBlocks(cache), BlockMemory(arrays), pool.layout, settle=_settling(cache.layers[0].device))


def _settling(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until the device has done all that has been launched on the steps' stream."""
    if device.type != "cuda":
        return lambda: None

    def settle() -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream(device))
        event.synchronize()

    return settle
