"""DeviceTables: the tokens and the KV blocks of all rows in the device's memory, updated from plans by few transfers.

The device itself writes the tokens that a step samples, so the next step can be launched before the host has them.
"""

from collections.abc import Sequence

import numpy as np
import torch

from core.execution.plan import SchedulerOutput
from core.execution.runner_table import RunnerTable
from ipc.tables.arrays import NO_INTS, AnyInts, Floats, Ints, Positions, Rows
from ipc.tables.rounding import ceil_div, round_up
from kernels.memory.kv_cache import KVCache

_ALIGNMENT = 4  # in int32 numbers: 16 bytes


class DeviceTables:
    """The tables tokens [rows, max_model_len + 1] and blocks [rows, P], both int32 on the device.

    Entries behind a row's own tokens and blocks are never read.
    """

    def __init__(self, num_rows: int, max_model_len: int, cache: KVCache) -> None:
        self.device = cache.layers[0].device
        num_tokens = max_model_len + 1  # the last sampled token is stored, but never computed
        shape = num_rows, ceil_div(num_tokens, cache.block_size)
        self.tokens = torch.zeros((num_rows, num_tokens), dtype=torch.int32, device=self.device)
        self.blocks = torch.zeros(shape, dtype=torch.int32, device=self.device)

    def apply(self, plan: SchedulerOutput, table: RunnerTable) -> None:
        """Write the tokens and blocks that the plan adds.

        table: the host's table, to which the plan is applied already.
        """
        added = plan.added
        if added:
            rows = np.repeat([new.row for new in added], [len(new.token_ids) for new in added])
            positions = np.concatenate([np.arange(len(new.token_ids)) for new in added])
            self._write(self.tokens, rows, positions, np.concatenate([new.token_ids for new in added]))
            rows = np.repeat([new.row for new in added], [len(new.block_ids) for new in added])
            positions = np.concatenate([np.arange(len(new.block_ids)) for new in added])
            self._write(self.blocks, rows, positions, np.concatenate([new.block_ids for new in added]))
        rows = plan.block_rows
        if len(rows):
            # The plan's blocks of one row are adjacent, and the host's table counts them already: the last of them is
            # the row's last block.
            from_end = np.arange(len(rows))[::-1] - _starts_of_runs(rows[::-1])[::-1]
            self._write(self.blocks, rows, table.num_blocks[rows] - 1 - from_end, plan.block_ids)

    def write_drafts(self, rows: Rows, positions: Positions, token_ids: AnyInts) -> None:
        """Write a draft token for each of these rows [n] at these positions [n], behind the row's tokens."""
        self._write(self.tokens, rows, positions, token_ids)

    def append(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write one sampled token for each of these rows [n] at these positions [n].

        All tensors are int32 on the device. A negative token (no valid sample) is written as 0. A row with drafts has
        several: up to the first that is not its draft they are the row's tokens, and those behind are never read.
        """
        self.tokens[rows.long(), positions.long()] = tokens.clamp_min(0)

    def send(self, column: AnyInts | Floats) -> torch.Tensor:
        """Return a copy of the column on the device; the host does not wait for the transfer."""
        tensor = torch.from_numpy(np.ascontiguousarray(column))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def send_columns(self, columns: Sequence[AnyInts]) -> list[torch.Tensor]:
        """Return int32 copies of the columns on the device, sent by one transfer.

        Each copy begins at a multiple of 16 bytes: Triton compiles a kernel anew for pointers that do not.
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
