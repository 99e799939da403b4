"""KVContents: an executor that keeps what a KV cache would hold, and reads each context back by the block tables."""

from collections.abc import Mapping, Sequence

import numpy as np

from core.execution.executor import ModelInfo, StepHandle
from core.execution.plan import SchedulerOutput
from core.executors.fake import mix
from ipc.options.config import EngineConfig
from ipc.tables.arrays import Ints, UInt64s
from tools.commands.replay.shrink.mirrored_oracle import MirroredOracle
from tools.commands.replay.what_if.oracle_executor import Candidates, ChoiceKey, Offers

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class MisreadError(Exception):
    """A row reads a block that holds something else than the row's own tokens."""


class KVContents(MirroredOracle):
    """A MirroredOracle whose KV cache has, for each slot, the checksum of all tokens up to its own.

    Where layers with a window have blocks of their own, the cache is that of the others.
    Errors of execute(): MisreadError.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        tokens: Mapping[ChoiceKey, Sequence[int]],
        candidates: Candidates | None = None,
        offers: Offers | None = None,
    ) -> None:
        super().__init__(config, info, tokens, candidates, offers)
        assert config.num_blocks_override is not None, "the config is not resolved"
        self._size, self._window = config.block_size, config.kv_window or 0
        self._has_pages = bool(config.kv_page_blocks)  # else layers with a window keep no block that it has passed
        num_blocks = config.num_blocks_override * max(1, config.kv_page_blocks or 0)
        self._kv = np.zeros((num_blocks, config.block_size), np.uint64)
        self._host = np.zeros((config.num_host_slots, config.block_size), np.uint64)

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run one step, write what it computes, and read back what its rows have read."""
        self._host[plan.swapped_out_slots] = self._kv[plan.swapped_out_blocks]
        self._kv[plan.copied_to] = self._kv[plan.copied_blocks]
        self._kv[plan.swapped_in_blocks] = self._host[plan.swapped_in_slots]
        step = super().execute(plan)
        firsts, slots, sums = list[int](), list[Ints](), list[UInt64s]()  # of what each row reads
        for row, count in zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True):
            end = int(self.mirror.num_computed_tokens[row])
            of_row, sums_of_row = self._slots(row, end), self._prefix_sums(row, end)
            self._kv.reshape(-1)[of_row[end - count :]] = sums_of_row[end - count :]
            first = max(0, end - count - self._window + 1) if self._window and not self._has_pages else 0
            firsts.append(first)
            slots.append(of_row[first:])
            sums.append(sums_of_row[first:])
        rows = plan.rows.tolist()
        for row, first, of_row, wanted in zip(rows, firsts, slots, sums, strict=True):  # after all have written
            wrong = first + np.flatnonzero(self._kv.reshape(-1)[of_row] != wanted)
            if len(wrong):
                raise MisreadError(f"step {plan.step}: row {row} reads other content at positions {wrong[:8].tolist()}")
        return step

    def _slots(self, row: int, end: int) -> Ints:
        positions = np.arange(end)
        blocks = self.mirror.blocks.read(row, 0, -(-end // self._size)).astype(np.int64)
        return blocks[positions // self._size] * self._size + positions % self._size

    def _prefix_sums(self, row: int, end: int) -> UInt64s:
        ids = self.mirror.tokens.read(row, 0, end).astype(np.uint64)
        return np.cumsum(mix((ids + np.uint64(1)) * _GOLDEN + mix(np.arange(1, end + 1, dtype=np.uint64))))
