"""AdapterWeights: the matrices of one adapter as in its files, and the digest that identifies them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ipc.errors import ModelFileError
from kernels.elements import to_floats
from kernels.low_rank import LORA_ARITHMETIC, LowRank

#: The largest factor of a product: the kernels compute in float32.
MAX_SCALE = float(np.finfo(np.float32).max)


class AdapterWeights(NamedTuple):
    """The matrices of one adapter, by the name of the matrix that each changes (model.layers.0.self_attn.q_proj)."""

    matrices: dict[str, LowRank]
    digest: str  # 32 hexadecimal digits, of everything that influences the tokens of a request with this adapter

    @property
    def rank(self) -> int:
        """Return the largest rank of its matrices."""
        return max(len(matrix.a) for matrix in self.matrices.values())


def checked_weights(
    source: Path, matrices: Mapping[str, LowRank], shapes: Mapping[str, tuple[int, int]], max_rank: int
) -> AdapterWeights:
    """Return the weights after checking them against a model's matrices.

    shapes: [out, in] of each matrix that an adapter may change. Errors: ModelFileError that names the matrix and the
    problem.
    """
    if not matrices:
        raise ModelFileError(f"{source}: the adapter changes nothing: it has no lora_A and lora_B")
    for name, matrix in matrices.items():
        columns, depth = shapes[name]
        rank = len(matrix.a)
        if matrix.a.shape != (rank, depth) or matrix.b.shape != (columns, rank) or not rank:
            raise ModelFileError(
                f"{source}: {name}: lora_A is {list(matrix.a.shape)} and lora_B {list(matrix.b.shape)}; the model's "
                f"matrix is [{columns}, {depth}], so they must be [r, {depth}] and [{columns}, r]"
            )
        if rank > max_rank:
            raise ModelFileError(f"{source}: {name} has rank {rank}, but max_lora_rank is {max_rank}")
        if not abs(matrix.scale) <= MAX_SCALE:
            raise ModelFileError(
                f"{source}: {name}: alpha divided by rank is {matrix.scale:g}; the maximum is {MAX_SCALE:g}"
            )
        for part, numbers in (("lora_A", matrix.a), ("lora_B", matrix.b)):
            if not np.isfinite(to_floats(numbers)).all():
                raise ModelFileError(f"{source}: {part} of {name} has numbers that are not finite")
    return AdapterWeights(dict(matrices), digest_of(matrices))


def digest_of(matrices: Mapping[str, LowRank]) -> str:
    """Return the digest of an adapter's content, independent of its files' names and layout."""
    digest = hashlib.blake2b(digest_size=16, person=b"engine-core lora")
    digest.update(b"%d" % LORA_ARITHMETIC)
    for name in sorted(matrices):
        a, b, scale = matrices[name]
        digest.update(f"\n{name} {a.dtype.name} {a.shape} {b.dtype.name} {b.shape} {float(scale).hex()}\n".encode())
        digest.update(np.ascontiguousarray(a).data)
        digest.update(np.ascontiguousarray(b).data)
    return digest.hexdigest()
