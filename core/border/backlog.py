"""Backlog: the messages that wait for one client that reads too slowly. Outputs of consecutive steps are merged.

Merging loses nothing. A row states the position of its first token, so the rows of one request, taken together, are one
longer row. 14 bytes per token and step become 4.
"""

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from ipc.tables.arrays import Ints
from ipc.wire.messages import Outputs, ServerMessage, TokenizerFiles, encode
from ipc.wire.scheduling_messages import RequestEvents

#: Bytes of columns merged into one message. No row in it gets near the 65,535 tokens that a count can hold.
MAX_MERGED_BYTES = 64 << 10
_ROW_COLUMNS = frozenset(
    ("numbers", "positions", "counts", "tokens", "choices", "finish", "stop_tokens", "started", "events", "drafts")
)
#: The other fields of Outputs and their defaults: Outputs that set one of these are sent unmerged.
_OTHER_FIELDS = tuple(
    (field.name, field.default_factory() if callable(field.default_factory) else field.default)
    for field in msgspec.structs.fields(Outputs)
    if field.name not in _ROW_COLUMNS | {"epoch", "step", "weights_version"}
)


class Backlog:
    """A queue of messages, first in, first out. num_bytes: bytes of everything that waits."""

    def __init__(self) -> None:
        # TokenizerFiles are sent by every session, so they are only encoded when they are sent
        self._frames: deque[bytes | TokenizerFiles] = deque()
        self._outputs: list[Outputs] = []  # come after the frames; not merged yet
        self._outputs_bytes = 0
        self._frames_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of everything that waits."""
        return self._frames_bytes + self._outputs_bytes

    def append(self, message: ServerMessage) -> None:
        """Add a message at the end."""
        if isinstance(message, Outputs) and _is_mergeable(message):
            if self._outputs and self._outputs[-1].weights_version != message.weights_version:
                self._seal()
            self._outputs.append(message)
            self._outputs_bytes += _num_bytes(message)
            if self._outputs_bytes >= MAX_MERGED_BYTES:
                self._seal()
        elif isinstance(message, TokenizerFiles):
            self._seal()
            self._frames.append(message)
            self._frames_bytes += _files_bytes(message)
        else:
            self._seal()
            self._append_frame(encode(message))

    def head(self) -> bytes | None:
        """Return the next frame to send, or None if nothing waits."""
        if not self._frames:
            self._seal()
        if not self._frames:
            return None
        head = self._frames[0]
        return head if isinstance(head, bytes) else encode(head)

    def pop_head(self) -> None:
        """Remove the frame that head() returned."""
        head = self._frames.popleft()
        self._frames_bytes -= len(head) if isinstance(head, bytes) else _files_bytes(head)

    def _seal(self) -> None:
        if self._outputs:
            self._append_frame(encode(merge_outputs(self._outputs)))
            self._outputs, self._outputs_bytes = [], 0

    def _append_frame(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._frames_bytes += len(frame)


def merge_outputs(parts: Sequence[Outputs]) -> Outputs:
    """Merge messages for one client, in order, into one message with one row per choice of a request.

    They are of one version of the weights.
    """
    started = b"".join(part.started for part in parts)
    drafts = b"".join(part.drafts for part in parts)
    events = _join_events([part.events for part in parts if part.events is not None])
    if len(parts) == 1 or not any(part.numbers for part in parts):
        return msgspec.structs.replace(parts[-1], started=started, events=events, drafts=drafts)
    numbers = np.frombuffer(b"".join(part.numbers for part in parts), "<u4").astype(np.int64)
    positions = np.frombuffer(b"".join(part.positions for part in parts), "<u4").astype(np.int64)
    counts = np.frombuffer(b"".join(part.counts for part in parts), "<u2").astype(np.int64)
    tokens = np.frombuffer(b"".join(part.tokens for part in parts), "<i4")
    choices = np.frombuffer(b"".join(part.choices or bytes(len(part.counts)) for part in parts), "<u2")
    finish = np.frombuffer(b"".join(part.finish or bytes(len(part.counts) // 2) for part in parts), np.uint8)
    order = np.lexsort((choices, numbers))  # stable: rows of one request stay in the order of their steps
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (np.diff(numbers[order]) != 0) | (np.diff(choices[order].astype(np.int64)) != 0)
    starts, ends = positions[order], positions[order] + counts[order]
    torn = np.flatnonzero(~is_first[1:] & (starts[1:] != ends[:-1]))
    assert not len(torn), f"request {numbers[order][torn]}: tokens up to {ends[torn]}, then from {starts[torn + 1]} on"
    firsts = np.flatnonzero(is_first)
    row_of = np.empty(len(order), np.int64)  # row of the parts -> row of the merged message
    row_of[order] = np.cumsum(is_first) - 1
    return Outputs(
        epoch=parts[0].epoch,
        step=parts[-1].step,
        numbers=numbers[order][firsts].astype("<u4").tobytes(),
        positions=starts[firsts].astype("<u4").tobytes(),
        counts=np.add.reduceat(counts[order], firsts).astype("<u2").tobytes(),
        tokens=tokens[_token_order(counts, order)].tobytes(),
        choices=choices[order][firsts].tobytes() if choices.any() else b"",
        finish=np.maximum.reduceat(finish[order], firsts).tobytes() if finish.any() else b"",
        stop_tokens=_stop_tokens(parts, row_of),
        started=started,
        events=events,
        drafts=drafts,
        weights_version=parts[0].weights_version,
    )


def _token_order(counts: Ints, order: Ints) -> Ints:
    """Return indices that bring the rows' tokens into the order of the rows."""
    starts = (np.cumsum(counts) - counts)[order]
    lengths = counts[order]
    places = np.cumsum(lengths) - lengths
    indices: Ints = np.repeat(starts - places, lengths) + np.arange(int(lengths.sum()))
    return indices


def _stop_tokens(parts: Sequence[Outputs], row_of: Ints) -> list[tuple[int, int]]:
    stop_tokens, base = [], 0
    for part in parts:
        stop_tokens += [(int(row_of[base + row]), token) for row, token in part.stop_tokens]
        base += len(part.counts) // 2
    return stop_tokens


def _files_bytes(message: TokenizerFiles) -> int:
    return sum(map(len, message.files.values()))


def _is_mergeable(message: Outputs) -> bool:
    return all(getattr(message, name) == default for name, default in _OTHER_FIELDS)


def _num_bytes(message: Outputs) -> int:
    events = 0 if message.events is None else 5 * len(message.events.numbers)
    return (
        2 * len(message.numbers)
        + len(message.counts)
        + len(message.tokens)
        + len(message.started)
        + events
        + len(message.drafts)
    )


def _join_events(parts: list[RequestEvents]) -> RequestEvents | None:
    """Concatenate events; None if there are none."""
    if not parts:
        return None
    names = RequestEvents.__struct_fields__
    return RequestEvents(*(b"".join(getattr(part, name) for part in parts) for name in names))
