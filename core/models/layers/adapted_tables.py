"""AdaptedTables: an adapter of an encoder that changes tables of embeddings, next to products."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from core.models.config import ModelConfig
from ipc.tables.arrays import Floats, Ints
from kernels.elements import to_floats
from kernels.low_rank import LowRank


def table_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return [hidden, rows] of the tables that adapters may change, by our name: of words and of kinds of tokens.

    What an adapter adds to the row of a word is its product with the vector that is 1 at the word's number.
    """
    if config.encoder is None:
        return {}
    rows = {"embeddings.words": config.vocab_size, "embeddings.kinds": config.encoder.num_kinds}
    return {name: (config.hidden_size, count) for name, count in rows.items() if count}


class AdaptedTables:
    """An adapter packed for the C kernels, and what it adds to tables."""

    def __init__(self, packed: Any, tables: Mapping[str, LowRank], num_words: int) -> None:
        """packed: from pack_adapter(). tables: by the names of table_shapes(). num_words: of the vocabulary."""
        self.packed, self._num_words = packed, num_words  # the former has the structs
        self.address: int = packed.address
        self.width: int = packed.width
        self._tables = {
            name: (np.ascontiguousarray(a.T), np.ascontiguousarray(to_floats(b).T), np.float32(scale))
            for name, (a, b, scale) in tables.items()
        }
        self.num_bytes: int = packed.num_bytes + sum(a.nbytes + b.nbytes for a, b, _ in self._tables.values())

    def add(self, rows: Floats, ids: Ints) -> None:
        """Add to the embeddings [n, hidden] float32 of these tokens [n], in place. ids: see CpuEmbedding.

        Each row is summed separately, in the order of the ranks.
        """
        indices = {"embeddings.words": ids % self._num_words, "embeddings.kinds": ids // self._num_words}
        for name, (a, b, scale) in self._tables.items():
            factors = to_floats(a[indices[name]]) * scale
            for rank, row in enumerate(b):
                rows += factors[:, rank, None] * row
