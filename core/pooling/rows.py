"""PoolingRows: the pooling rows of a batch, and what is gathered from their hidden states over the steps."""

from collections.abc import Iterable

import numpy as np

from core.execution.plan import NewPooling, PooledColumns
from core.models.step import StepResult
from core.pooling.pooler import Method, Pooler
from ipc.params.pooling_params import PoolingParams
from ipc.tables.arrays import AnyInts, Doubles, Floats, Int32s, Ints, Rows


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

    def collect(
        self, rows: Rows, num_tokens: AnyInts, context_lens: AnyInts, result: StepResult
    ) -> PooledColumns | None:
        """Take the hidden states of a step, and return the vectors of rows whose last tokens it computed.

        rows, num_tokens, context_lens [R]: of the step's inputs. A request whose vectors are not finite has none.
        """
        assert self._pooler is not None, "no row pools"
        mine = [index for index, row in enumerate(rows.tolist()) if row in self._rows]
        gathered = [self._rows[row] for row in rows[mine].tolist()]
        ends, counts = context_lens[mine].tolist(), num_tokens[mine].tolist()
        firsts = (np.cumsum(num_tokens) - num_tokens)[mine].tolist()
        columns = list(zip(gathered, firsts, counts, ends, strict=True))
        wanted: list[Ints] = [row.wanted(first, count, end) for row, first, count, end in columns]
        lengths = [len(each) for each in wanted]
        if any(lengths):
            hidden = np.split(result.hidden_of(np.concatenate(wanted)), np.cumsum(lengths)[:-1])
            for row, states in zip(gathered, hidden, strict=True):
                row.take(states)
        places = [place for place, (row, _, _, end) in enumerate(columns) if end == row.num_tokens]
        if not places:
            return None
        vectors = [self._pooler(gathered[place].pooled(), gathered[place].params) for place in places]
        vectors = [each if np.isfinite(each).all() else each[:0] for each in vectors]
        return PooledColumns(
            rows=_int32s(mine[place] for place in places),
            counts=_int32s(len(each) for each in vectors),
            widths=_int32s(each.shape[1] for each in vectors),
            values=np.concatenate([each.ravel() for each in vectors]),
        )


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
