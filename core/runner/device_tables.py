"""DeviceTables: a device runner's tables of tokens and KV blocks. DeviceLogits: logits on a device, for their edits."""

from collections.abc import Sequence

import numpy as np
import torch

from core.execution.plan import SchedulerOutput
from core.execution.runner_table import RunnerTable
from core.sampling.edit_group import Index
from ipc.tables.arrays import NO_INTS, AnyInts, Floats, Ints, Positions, Rows
from ipc.tables.rounding import ceil_div, round_up
from kernels.memory.kv_cache import KVCache
from kernels.triton.log_softmax import log_softmax

# DeviceLogits: logits on a device, read and written as an array by sampling options that edit logits.


class DeviceLogits:
    """Logits [S, V] float32 on a device, with the protocol Logits. Each access is a transfer."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits, self.shape = logits, tuple(logits.shape)

    def __getitem__(self, index: Index) -> Floats:
        """Return a copy of some logits in host memory."""
        found: Floats = self._logits[self._on_device(index)].cpu().numpy()
        return found

    def __setitem__(self, index: Index, values: Floats | float) -> None:
        """Set some logits."""
        self._logits[self._on_device(index)] = torch.as_tensor(values, dtype=torch.float32, device=self._logits.device)

    def _on_device(self, index: Index) -> torch.Tensor | tuple[torch.Tensor, ...]:
        device = self._logits.device
        if isinstance(index, tuple):
            return tuple(torch.as_tensor(part, device=device) for part in index)
        return torch.as_tensor(index, device=device)


def normalize_on_device(logits: torch.Tensor, which: Ints, temperatures: Floats, tables: "DeviceTables") -> None:
    """Turn the logits [S, V] of these rows into log probabilities, in place: normalize() on the device."""
    divisors = tables.send(np.where(temperatures > 0, temperatures, 1).astype(np.float32))
    places = tables.send(which)
    logits[places] = log_softmax(logits[places], divisors)


# DeviceTables: the tokens and KV blocks of all rows in device memory, updated from plans with few transfers.
# The device itself writes the tokens that a step samples, so the next step can be launched before the host has them.


_ALIGNMENT = 4  # in int32 elements: 16 bytes


class DeviceTables:
    """The tables tokens [rows, max_model_len + 1] and blocks [rows, P], both int32 on the device.

    Entries after a row's own tokens and blocks are never read.
    """

    def __init__(self, num_rows: int, max_model_len: int, cache: KVCache) -> None:
        self.device = cache.layers[0].device
        num_tokens = max_model_len + 1  # the last sampled token is stored, but never computed
        shape = num_rows, ceil_div(num_tokens, cache.block_size)
        self.tokens = torch.zeros((num_rows, num_tokens), dtype=torch.int32, device=self.device)
        self.blocks = torch.zeros(shape, dtype=torch.int32, device=self.device)

    def apply(self, plan: SchedulerOutput, table: RunnerTable) -> None:
        """Write the tokens and blocks that the plan adds.

        table: the host's table, after the plan was applied to it.
        """
        added = plan.starts
        if added:
            rows = np.repeat([new.row for new in added], [len(new.token_ids) for new in added])
            positions = np.concatenate([np.arange(len(new.token_ids)) for new in added])
            self._write(self.tokens, rows, positions, np.concatenate([new.token_ids for new in added]))
            rows = np.repeat([new.row for new in added], [len(new.block_ids) for new in added])
            positions = np.concatenate([np.arange(len(new.block_ids)) for new in added])
            self._write(self.blocks, rows, positions, np.concatenate([new.block_ids for new in added]))
        rows = plan.block_rows
        if len(rows):
            # The plan's blocks of one row are adjacent, and the host's table already counts them: the last of them is
            # the row's last block.
            from_end = np.arange(len(rows))[::-1] - _starts_of_runs(rows[::-1])[::-1]
            self._write(self.blocks, rows, table.num_blocks[rows] - 1 - from_end, plan.block_ids)

    def write_drafts(self, rows: Rows, positions: Positions, token_ids: AnyInts) -> None:
        """Write a draft token for each of these rows [n] at these positions [n], after the row's tokens."""
        self._write(self.tokens, rows, positions, token_ids)

    def append(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write one sampled token for each of these rows [n] at these positions [n].

        All tensors are int32 on the device. A negative token (no valid sample) is written as 0. A row with drafts has
        several: those up to the first that differs from its draft become the row's tokens, and the rest are never read.
        """
        self.tokens[rows.long(), positions.long()] = tokens.clamp_min(0)

    def send(self, column: AnyInts | Floats) -> torch.Tensor:
        """Return a copy of the column on the device. The host does not wait for the transfer."""
        tensor = torch.from_numpy(np.ascontiguousarray(column))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def send_columns(self, columns: Sequence[AnyInts]) -> list[torch.Tensor]:
        """Return int32 copies of the columns on the device, sent by one transfer.

        Each copy starts at a multiple of 16 bytes, because Triton compiles separate kernels for other alignments.
        """
        lengths = np.array([len(column) for column in columns])
        ends = np.cumsum(round_up(lengths, _ALIGNMENT))
        packed = np.zeros(int(ends[-1]), np.int32)
        starts = np.concatenate(([0], ends[:-1])).tolist()
        for column, start in zip(columns, starts, strict=True):
            packed[start : start + len(column)] = column
        sent = self.send(packed)
        return [sent[start : start + length] for start, length in zip(starts, lengths.tolist(), strict=True)]

    def _write(self, table: torch.Tensor, rows: Rows, positions: Positions, values: AnyInts) -> None:
        if len(rows):
            places = self.send(rows.astype(np.int64) * table.shape[1] + positions)
            table.view(-1)[places] = self.send(values.astype(np.int32))


def _starts_of_runs(values: AnyInts) -> Ints:
    """Return, for each value, the index where its run of equal values begins."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1)) if len(values) else NO_INTS
    return np.repeat(starts, np.diff(starts, append=len(values)))
