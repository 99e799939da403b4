"""OutputColumns: what a step has for the clients, gathered as columns and split by client once."""

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from core.request import Request
from ipc.messages import ErrorCode, FinishReason, Outputs, RequestFailed
from ipc.paged_rows import Int32s, Ints

#: (client, message) in the order in which they are to be sent.
Addressed: TypeAlias = tuple[int, Outputs | RequestFailed]


class _Rows(NamedTuple):
    """Rows of one or several clients."""

    clients: Ints
    numbers: Ints
    positions: Ints
    tokens: Int32s  # one per row, or none at all
    finish: npt.NDArray[np.uint8]
    stop_tokens: npt.NDArray[np.bool_]  # the row's token was one of its stop_token_ids

    def take(self, rows: Ints) -> "_Rows":
        return _Rows(
            self.clients[rows],
            self.numbers[rows],
            self.positions[rows],
            self.tokens[rows],
            self.finish[rows],
            self.stop_tokens[rows],
        )


class _Packed:
    """Rows as the columns of the wire."""

    def __init__(self, rows: _Rows) -> None:
        self.clients = rows.clients
        self.numbers = rows.numbers.astype("<u4", copy=False).tobytes()
        self.positions = rows.positions.astype("<u4").tobytes()
        self.counts = (b"\1\0" if len(rows.tokens) else b"\0\0") * len(rows.clients)
        self.tokens = rows.tokens.astype("<i4", copy=False).tobytes()
        self.finish = rows.finish.tobytes() if rows.finish.any() else b""
        stopped = np.flatnonzero(rows.stop_tokens).tolist() if rows.stop_tokens.any() else []
        self.stopped = [(row, int(rows.tokens[row])) for row in stopped]


class OutputColumns:
    """Filled during a step, drained at its end."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._rows: list[_Rows] = []
        self._started: dict[int, list[tuple[int, int]]] = {}
        self._failed: list[Addressed] = []

    def add_tokens(
        self,
        clients: Ints,
        numbers: Ints,
        positions: Ints,
        tokens: Int32s,
        finish: npt.NDArray[np.uint8],
        stop_tokens: npt.NDArray[np.bool_],
    ) -> None:
        """One row per sampled token."""
        if len(clients):
            self._rows.append(_Rows(clients, numbers, positions, tokens, finish, stop_tokens))

    def add_finish(self, request: Request, num_output_tokens: int, reason: FinishReason) -> None:
        """The request ends without a token in this step."""
        self._rows.append(
            _Rows(
                np.array([request.client]),
                np.array([request.number], np.uint32),
                np.array([num_output_tokens]),
                np.zeros(0, np.int32),
                np.array([reason], np.uint8),
                np.zeros(1, np.bool_),
            )
        )

    def add_started(self, request: Request, num_cached_tokens: int) -> None:
        self._started.setdefault(request.client, []).append((request.number, num_cached_tokens))

    def add_failed(self, client: int, number: int, code: ErrorCode, message: str) -> None:
        self._failed.append((client, RequestFailed(number, code, message)))

    def drain(self, step: int) -> list[Addressed]:
        """Everything added since the last drain."""
        messages: list[Addressed] = []
        for rows in self._rows:
            messages.extend(self._split(step, rows))
        for client, started in self._started.items():
            messages.append((client, self._only_started(step, started)))
        messages.extend(self._failed)
        self._rows, self._started, self._failed = [], {}, []
        return messages

    def _split(self, step: int, rows: _Rows) -> list[Addressed]:
        """One message for each client, cut out of the encoded columns of all."""
        clients = rows.clients
        if clients[0] == clients[-1] and (clients == clients[0]).all():
            return [(int(clients[0]), self._message(step, _Packed(rows), 0, len(clients)))]
        order = np.argsort(clients, kind="stable")
        packed = _Packed(rows.take(order))
        starts = np.flatnonzero(np.diff(packed.clients, prepend=-1))
        ends = [*starts[1:].tolist(), len(order)]
        return [
            (client, self._message(step, packed, start, end))
            for client, start, end in zip(packed.clients[starts].tolist(), starts.tolist(), ends, strict=True)
        ]

    def _message(self, step: int, packed: "_Packed", start: int, end: int) -> Outputs:
        finish = packed.finish[start:end]
        return Outputs(
            epoch=self._epoch,
            step=step,
            numbers=packed.numbers[4 * start : 4 * end],
            positions=packed.positions[4 * start : 4 * end],
            counts=packed.counts[2 * start : 2 * end],
            tokens=packed.tokens[4 * start : 4 * end],
            finish=finish if any(finish) else b"",
            stop_tokens=[(row - start, token) for row, token in packed.stopped if start <= row < end],
            started=_pairs(self._started.pop(int(packed.clients[start]), [])) if self._started else b"",
        )

    def _only_started(self, step: int, started: list[tuple[int, int]]) -> Outputs:
        return Outputs(self._epoch, step, b"", b"", b"", b"", started=_pairs(started))


def _pairs(pairs: list[tuple[int, int]]) -> bytes:
    return np.array(pairs, "<u4").tobytes()
