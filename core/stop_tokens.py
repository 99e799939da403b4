"""StopTokens: the index group of rows that have stop_token_ids; other rows never pay for it."""

import numpy as np
import numpy.typing as npt

from ipc.paged_rows import Int32s, Ints


class StopTokens:
    """A sorted column of row << 32 | token id."""

    def __init__(self) -> None:
        self._keys = np.zeros(0, np.int64)

    def add(self, row: int, token_ids: list[int]) -> None:
        keys = (np.int64(row) << 32) | np.array(token_ids, np.int64)
        self._keys = np.union1d(self._keys, keys)

    def remove(self, row: int) -> None:
        self._keys = self._keys[self._keys >> 32 != row]

    def match(self, rows: Ints, token_ids: Int32s) -> npt.NDArray[np.bool_]:
        """True where token_ids[i] is a stop token of rows[i]."""
        keys = (rows.astype(np.int64) << 32) | token_ids
        places = np.searchsorted(self._keys, keys)
        found: npt.NDArray[np.bool_] = self._keys[np.minimum(places, len(self._keys) - 1)] == keys
        return found
