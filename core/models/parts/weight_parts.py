"""WeightParts: a model's weights by name, from an iterator that is only read as far as necessary."""

from collections.abc import Iterable

import numpy as np

from core.models.operations.stored_matrix import StoredMatrix, Weight
from ipc.errors import ModelFileError
from ipc.tables.arrays import Floats
from kernels.elements import to_floats


class WeightParts:
    """The weights of an iterator, by name. Weights read before they are needed are kept until they are taken."""

    def __init__(self, weights: Iterable[tuple[str, Weight]]) -> None:
        self._weights = iter(weights)
        self._waiting: dict[str, Weight] = {}

    def take(self, *names: str) -> Floats:
        """Return a copy of the named vectors in float32, concatenated.

        Errors: ModelFileError naming the missing tensors.
        """
        found = [self._take(names, name) for name in names]
        vectors = [to_floats(weight) for weight in found if isinstance(weight, np.ndarray)]
        assert len(vectors) == len(names), f"{names}: a matrix is requested as a vector"
        return np.concatenate(vectors)

    def take_matrix(self, *names: str) -> StoredMatrix:
        """Return the named matrices with their rows concatenated, as stored, without conversion.

        Errors: ModelFileError naming the missing tensors.
        """
        found = [self._take(names, name) for name in names]
        matrices = [StoredMatrix.of(weight) if isinstance(weight, np.ndarray) else weight for weight in found]
        return StoredMatrix.joined(matrices)

    def _take(self, names: tuple[str, ...], name: str) -> Weight:
        """Return the weight with this name. names: all names of the same request, for the error text."""
        while name not in self._waiting:
            try:
                read, weight = next(self._weights)
            except StopIteration:
                missing = sorted(set(names[names.index(name) :]) - self._waiting.keys())
                raise ModelFileError(f"the model file lacks these tensors: {', '.join(missing)}") from None
            self._waiting[read] = weight
        return self._waiting.pop(name)
