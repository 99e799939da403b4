"""DeviceLogits: logits on a device, read and written as an array, for the edits of sampling options."""

import torch

from core.sampling.edit_group import Index
from ipc.tables.arrays import Floats


class DeviceLogits:
    """Logits [S, V] float32 on a device, of the protocol Logits. Each access is a transfer."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits, self.shape = logits, tuple(logits.shape)

    def __getitem__(self, index: Index) -> Floats:
        """Return a copy of some logits in the host's memory."""
        found: Floats = self._logits[self._on_device(index)].cpu().numpy()
        return found

    def __setitem__(self, index: Index, values: Floats | float) -> None:
        """Set some logits."""
        self._logits[self._on_device(index)] = torch.as_tensor(values, dtype=torch.float32, device=self._logits.device)

    def _on_device(self, index: Index) -> torch.Tensor | tuple[torch.Tensor, ...]:
        device = self._logits.device
        if isinstance(index, tuple):
            return tuple(torch.as_tensor(part, device=device) for part in index)
        return torch.as_tensor(index, device=device)
