"""DevicePartExecutor: the CUDA executor for a rank's part of the model, in a worker process, on a GPU of its own.

All ranks run the same plan with the same runner: at numerics level L2 each has the bits of all logits, and draws the
same tokens. So none waits for another's tokens, and only the first one's output is used.
"""

import os
import socket

import torch

from core.device import cuda_device
from core.executors.cuda import CudaExecutor
from core.models.parts.rank import Rank
from core.models.parts.shard import Shard
from core.workers.wires import Place, Wires
from ipc.errors import ConfigError
from ipc.machine.channel import Channel
from ipc.options.config import EngineConfig
from kernels.torch.group import join_group


class DevicePartExecutor(CudaExecutor):
    """The executor for one rank. Rank 3 has the GPU with number 3 among those that CUDA_VISIBLE_DEVICES leaves."""

    def __init__(self, config: EngineConfig, place: Place, wires: Wires) -> None:
        """Load the rank's part of the model. Errors: those of CudaExecutor; ConfigError if there are too few GPUs."""
        device = cuda_device()
        if device.type == "cuda":
            if (count := torch.cuda.device_count()) < place.size:
                raise ConfigError(
                    f"tensor_parallel_size={place.size} is more than the {count} GPUs of this machine: use at most "
                    f"{count}"
                )
            torch.cuda.set_device(place.rank)
            device = cuda_device()
        self._peers = [Channel(socket.socket(fileno=fd)) for fd in wires.peers]
        group = join_group(place.rank, place.size, self._meeting_file(place.rank), device)
        super().__init__(config, Rank(Shard(place.rank, place.size), group), group.now)

    def _meeting_file(self, rank: int) -> str:
        """Return the path of a file in memory, the first rank's, that lasts as long as its process."""
        if rank:
            return self._peers[0].receive().decode()
        path = f"/proc/{os.getpid()}/fd/{os.memfd_create('engine-core-ranks', os.MFD_CLOEXEC)}"
        for peer in self._peers:
            peer.send(path.encode())
        return path
