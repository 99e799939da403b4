"""TritonKVCache: a KVCache in a device's memory, in the layout of the torch path: a head's tokens of a block lie
together, so that a program, which reads one head, reads whole lines. Copies go to another cache of the device, or to
and from one in pinned host memory."""

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.kv_cache import KVCache
from kernels.triton.copy_blocks import copy_blocks


class TritonKVCache(KVCache):
    """Errors: MemoryError with the sizes when it cannot be reserved."""

    def copy_blocks(self, sources: NDArray[np.int32], target: KVCache, targets: NDArray[np.int32]) -> None:
        """target's blocks targets [n] become this cache's blocks sources [n], in all layers. Ordered after and before
        what else is launched on the device's stream; when one of the two is in host memory too."""
        if not len(sources):
            return
        for mine, theirs in zip(self.layers, target.layers, strict=True):
            _copy_layer(mine, sources, theirs, targets)


def _copy_layer(
    source: torch.Tensor, sources: NDArray[np.int32], target: torch.Tensor, targets: NDArray[np.int32]
) -> None:
    on_source, on_target = (torch.from_numpy(ids).to(x.device) for ids, x in ((sources, source), (targets, target)))
    if source.device == target.device:
        copy_blocks(source, on_source, target, on_target)
    elif source.is_cuda:
        staged = source.new_empty(len(sources), *source.shape[1:])
        copy_blocks(source, on_source, staged, torch.arange(len(sources), dtype=torch.int32, device=source.device))
        # One wait: the host must not read or reuse what the device still writes.
        target[on_target.long()] = staged.cpu()
    else:
        host = source[on_source.long()].pin_memory()
        staged = host.to(target.device, non_blocking=True)
        copy_blocks(staged, torch.arange(len(sources), dtype=torch.int32, device=target.device), target, on_target)
