"""LatentWeights: the weights of one layer around latent attention."""

from typing import NamedTuple

from core.models.operations.stored_matrix import StoredMatrix
from ipc.tables.arrays import Floats


class LatentWeights(NamedTuple):
    """A layer's weights around latent attention."""

    keys: list[StoredMatrix]  # [latent_dim, plain_dim] of each head
    values: list[StoredMatrix]  # [value_dim, latent_dim]
    latent_norm: Floats
    query: StoredMatrix | None  # [H * (plain_dim + rotated_dim), query_dim]
    query_norm: Floats | None
