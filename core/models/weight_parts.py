"""WeightParts: a model's tensors by name, from an iterator read only as far as is needed."""

from collections.abc import Iterable

import torch

from ipc.errors import ModelFileError


class WeightParts:
    """What was read and not asked for yet waits; what was taken is forgotten."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._weights = iter(weights)
        self._waiting: dict[str, torch.Tensor] = {}

    def take(self, *names: str) -> torch.Tensor:
        """The named tensors, stacked along the first dimension. Errors: ModelFileError naming what is missing."""
        while not self._waiting.keys() >= set(names):
            try:
                name, tensor = next(self._weights)
            except StopIteration:
                missing = sorted(set(names) - self._waiting.keys())
                raise ModelFileError(f"the model file lacks these tensors: {', '.join(missing)}") from None
            self._waiting[name] = tensor
        tensors = [self._waiting.pop(name) for name in names]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
