"""PoolingRows: the pooling rows of a batch, and what is gathered from their hidden states over the steps."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from core.execution.plan import NewPooling, PooledColumns
from core.pooling.pooler import Method, Pooler
from ipc.params.pooling_params import PoolingParams
from ipc.tables.arrays import NO_INTS, AnyInts, Doubles, Floats, Int32s, Ints, Rows


class PoolingRows:
    """The pooling rows of a runner. They are handled one by one, because most of them last one step."""

    def __init__(self, pooler: Pooler | None) -> None:
        """Start without rows. pooler: None = no request pools."""
        self._pooler = pooler
        self._rows: dict[int, _Gathered] = {}

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def add(self, new: NewPooling) -> None:
        """Add a row that starts, or restarts."""
        params, pooler = new.params, self._pooler
        assert pooler is not None, f"row {new.row} is a pooling request, but the model does not pool"
        is_token = params.task in ("token_embed", "token_classify")
        self._rows[new.row] = _Gathered(params, "tokens" if is_token else pooler.method, len(new.token_ids))

    def remove(self, row: int) -> None:
        """Forget a row. A row that does not pool is ignored."""
        self._rows.pop(row, None)

    def wanted(self, rows: Rows, num_tokens: AnyInts, context_lens: AnyInts) -> "Wanted":
        """Return what is wanted of a step. rows, num_tokens, context_lens [R]: of its inputs."""
        mine = [index for index, row in enumerate(rows.tolist()) if row in self._rows]
        gathered = [self._rows[row] for row in rows[mine].tolist()]
        ends, counts = context_lens[mine].tolist(), num_tokens[mine].tolist()
        firsts = (np.cumsum(num_tokens) - num_tokens)[mine].tolist()
        columns = list(zip(gathered, firsts, counts, ends, strict=True))
        tokens: list[Ints] = [row.wanted(first, count, end) for row, first, count, end in columns]
        ended = [(index, row) for index, (row, _, _, end) in zip(mine, columns, strict=True) if end == row.num_tokens]
        return Wanted(np.concatenate([NO_INTS, *tokens]), [len(each) for each in tokens], gathered, ended)

    def collect(self, wanted: "Wanted", hidden: Floats | None) -> PooledColumns | None:
        """Take the hidden states of the wanted tokens, and return the vectors of rows whose last tokens they are.

        hidden [n, hidden]: None if no tokens are wanted. Called in the order of the steps. A request whose vectors are
        not finite has none.
        """
        assert self._pooler is not None, "no row pools"
        if hidden is not None:
            for row, states in zip(wanted.rows, np.split(hidden, np.cumsum(wanted.lengths)[:-1]), strict=True):
                row.take(states)
        if not wanted.ended:
            return None
        vectors = [self._pooler(row.pooled(), row.params) for _, row in wanted.ended]
        vectors = [each if np.isfinite(each).all() else each[:0] for each in vectors]
        return PooledColumns(
            rows=_int32s(index for index, _ in wanted.ended),
            counts=_int32s(len(each) for each in vectors),
            widths=_int32s(each.shape[1] for each in vectors),
            values=np.concatenate([each.ravel() for each in vectors]),
        )


class Wanted(NamedTuple):
    """What the pooling rows of a step want of it."""

    tokens: Ints  # [n] indices of the step's tokens whose hidden states are wanted
    lengths: list[int]  # how many of them each row has
    rows: list["_Gathered"]
    ended: list[tuple[int, "_Gathered"]]  # rows whose last tokens are in the step, with their indices in the plan


class _Gathered:
    """What one row has gathered so far. Sums are float64, in token order, so chunks do not change them."""

    def __init__(self, params: PoolingParams, method: Method | str, num_tokens: int) -> None:
        self.params, self.num_tokens = params, num_tokens
        self._method = method
        self._parts: list[Doubles] = []  # [n, hidden]; a single [1, hidden], unless there is a vector per token

    def wanted(self, first: int, count: int, end: int) -> Ints:
        """Return the indices of the step's tokens whose hidden states are needed.

        The row has `count` tokens from index `first` on, and `end` computed ones.
        """
        if self._method == "last":
            return np.arange(first + count - 1, first + count) if end == self.num_tokens else np.arange(0)
        if self._method == "cls":
            return np.arange(first, first + 1) if end == count else np.arange(0)
        return np.arange(first, first + count)

    def take(self, states: Floats) -> None:
        """Take the hidden states [n, hidden] of the tokens that wanted() returned."""
        if not len(states):
            return
        if self._method == "mean":
            self._parts = [np.add.reduce(np.concatenate([*self._parts, states.astype(np.float64)]), keepdims=True)]
        elif self._method == "max":
            self._parts = [np.maximum.reduce(np.concatenate([*self._parts, states]).astype(np.float64), keepdims=True)]
        else:
            self._parts.append(states.astype(np.float64))

    def pooled(self) -> Doubles:
        """Return the pooled hidden states [n, hidden]."""
        pooled = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        return pooled / self.num_tokens if self._method == "mean" else pooled


def _int32s(values: Iterable[int]) -> Int32s:
    return np.fromiter(values, np.int32)
