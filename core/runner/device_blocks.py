"""The blocks of a device's KV cache, and of the host's pool next to it, for code that accesses them between steps."""

from collections.abc import Callable, Sequence

import torch

from core.execution.shared_blocks import BlockMemory, SharedBlocks
from kernels.memory.kv_cache import KVCache


class DeviceBlocks:
    """Blocks in device memory, which are read and written through copies in host memory.

    The copies are made on a stream of their own, so that they wait for no step, and no step for them.
    """

    def __init__(self, arrays: Sequence[torch.Tensor]) -> None:
        """arrays: each [blocks, ...] has one part of each block, contiguous."""
        self._arrays, device = arrays, arrays[0].device
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        return len(self._arrays[0])

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes of one block."""
        return sum(array[0].nbytes for array in self._arrays)

    def views(self, *blocks: int) -> list[memoryview]:
        """Return the parts of each block, block after block, as they are now."""
        with torch.cuda.stream(self._stream):
            parts = [array[block].to("cpu", copy=True) for block in blocks for array in self._arrays]
        return [memoryview(part.flatten().view(torch.uint8).numpy().data) for part in parts]

    def room(self, *blocks: int) -> list[memoryview]:
        """Return host memory for the parts of each block, which fill() copies to the device."""
        sizes = [array[block].nbytes for block in blocks for array in self._arrays]
        return [memoryview(torch.empty(size, dtype=torch.uint8).numpy().data) for size in sizes]

    def fill(self, parts: Sequence[memoryview], *blocks: int) -> None:
        """Copy the parts to these blocks, and wait for it. No step in flight uses them."""
        places = [array[block] for block in blocks for array in self._arrays]
        with torch.cuda.stream(self._stream):
            for place, part in zip(places, parts, strict=True):
                place.copy_(torch.frombuffer(part, dtype=place.dtype).view(place.shape))
        if self._stream is not None:
            self._stream.synchronize()


def shared_device_blocks(
    caches: Sequence[KVCache], pools: Sequence[KVCache], layout: str, states: torch.Tensor | None
) -> SharedBlocks:
    """Return the blocks of a device's caches and of their pools in host memory, to be accessed by another thread.

    A block has a part in each cache, and its number is the same in all. states: the recurrent states, each at its
    number in plans; None: there are none.
    When a step's orders are given, the step and its copies between cache and pool have been launched but may not have
    ended.
    """
    own = [layer for cache in caches for layer in cache.layers]
    arrays = [layer.flatten(1).view(torch.uint8).numpy() for pool in pools for layer in pool.layers]
    of_states = None if states is None else DeviceBlocks([states])
    return SharedBlocks(DeviceBlocks(own), BlockMemory(arrays), layout, of_states, settle=_settling(own[0].device))


def _settling(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until the device has done all that has been launched on the steps' stream."""
    if device.type != "cuda":
        return lambda: None

    def settle() -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream(device))
        event.synchronize()

    return settle
