"""DeviceGroup: ranks with a device each exchange results through torch.distributed: over NCCL, or gloo on CPUs.

Only copies cross ranks: a number is computed by one rank, and all others get its bits.
"""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed

#: all_gather_into_tensor has had another name since torch 2.13.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
#: Ranks load models and compile kernels at different speeds. If one dies, its engine ends the others.
_PATIENCE = timedelta(minutes=30)


class DeviceGroup:
    """The exchanges of one rank. All ranks call the same methods in the same order, with tensors of the same types."""

    def __init__(self, size: int, device: torch.device) -> None:
        """size: the number of ranks. device: of this rank's tensors."""
        self._size, self._device = size, device

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Return the columns of all ranks, rank after rank [T, sum(widths)]. part [T, own width]: this rank's.

        widths: of each rank's columns.
        """
        most, count = max(widths), len(part)
        own = part.contiguous()
        if part.shape[1] < most:
            own = part.new_empty(count, most)
            own[:, : part.shape[1]] = part
        every = part.new_empty(self._size, count, most)
        if count:
            self._gather_bytes(every.view(torch.uint8), own.view(torch.uint8))
        if most * self._size == sum(widths):
            return every.transpose(0, 1).reshape(count, -1)
        return torch.cat([columns[:, :width] for columns, width in zip(every, widths, strict=True)], 1)

    def join_rows(self, rows: torch.Tensor, elsewhere: torch.Tensor) -> torch.Tensor:
        """Return rows [T, d] float32 of which each is one rank's, in place. elsewhere [T]: which are not this one's.

        The bits are added as integers. As all but one rank's are zero, no order of the ranks changes a bit.
        """
        assert rows.dtype == torch.float32, rows.dtype
        rows.masked_fill_(elsewhere[:, None], 0.0)
        if len(rows):
            self._add_words(rows.view(torch.int32))
        return rows

    def now(self) -> int:
        """Return the first rank's time in ns, since an arbitrary moment: the same on all ranks."""
        own = torch.tensor([time.perf_counter_ns()], device=self._device)
        every = own.new_empty(self._size)
        self._gather_bytes(every.view(torch.uint8), own.view(torch.uint8))
        return int(every[0])

    def _gather_bytes(self, every: torch.Tensor, own: torch.Tensor) -> None:
        """Write all ranks' bytes, rank after rank, into every. own: this rank's."""
        _all_gather(every.view(-1), own.view(-1))

    def _add_words(self, words: torch.Tensor) -> None:
        """Add all ranks' integers to words int32, in place."""
        distributed.all_reduce(words)


def join_group(rank: int, size: int, file: str, device: torch.device) -> DeviceGroup:
    """Join the group of this process, and wait for its other ranks.

    file: an empty file that all ranks have opened, through which they find one another. Errors: RuntimeError if they do
    not meet.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = distributed.FileStore(file, size)  # type: ignore[attr-defined]
    distributed.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=_PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )
    return DeviceGroup(size, device)
