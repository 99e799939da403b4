"""unchanged: used for an operation that an architecture lacks, or that another operation includes."""

from core.models.operations.tensor import Tensor


def unchanged(x: Tensor) -> Tensor:
    """Return x itself."""
    return x
