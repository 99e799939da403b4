"""WeightParts: a model's weights by name, from an iterator that is read only as far as necessary."""

from collections.abc import Iterable

import torch

from core.models.stored_matrix import StoredMatrix, Weight
from ipc.errors import ModelFileError


class WeightParts:
    """The weights of an iterator, by name. Weights read before they are needed are kept until they are taken."""

    def __init__(self, weights: Iterable[tuple[str, Weight]]) -> None:
        self._weights = iter(weights)
        self._waiting: dict[str, Weight] = {}

    def take(self, *names: str) -> torch.Tensor:
        """Return the named vectors, concatenated. Errors: ModelFileError naming the missing tensors."""
        found = [self._take(names, name) for name in names]
        tensors = [weight for weight in found if isinstance(weight, torch.Tensor)]
        assert len(tensors) == len(names), f"{names}: a matrix is asked for as a vector"
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def take_matrix(self, *names: str) -> StoredMatrix:
        """Return the named matrices with their rows concatenated, as they are stored, without conversion.

        Errors: ModelFileError naming the missing tensors.
        """
        found = [self._take(names, name) for name in names]
        matrices = [StoredMatrix.of(weight) if isinstance(weight, torch.Tensor) else weight for weight in found]
        return StoredMatrix([part for matrix in matrices for part in matrix.parts])

    def _take(self, names: tuple[str, ...], name: str) -> Weight:
        """Return the weight with this name. names: all names of the same request, for the error's text."""
        while name not in self._waiting:
            try:
                read, weight = next(self._weights)
            except StopIteration:
                missing = sorted(set(names[names.index(name) :]) - self._waiting.keys())
                raise ModelFileError(f"the model file lacks these tensors: {', '.join(missing)}") from None
            self._waiting[read] = weight
        return self._waiting.pop(name)
