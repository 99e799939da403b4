"""ModelRunner: turns plans into the model's inputs, as columns, and logits into sampled tokens."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from core.models.llama import Llama
from core.plan import FAILED_TOKEN, NO_TOKEN, ModelRunnerOutput, SchedulerOutput
from core.runner_table import RunnerTable
from core.sampler import sample
from core.sampling_columns import SamplingColumns
from ipc.paged_rows import Int32s, Ints


class StepInputs(NamedTuple):
    """One step's tokens, packed request after request. T tokens of R rows, of which S sample."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64 block * block_size + offset
    num_tokens: Int32s  # [R]
    context_lens: Ints  # [R] tokens in the cache after this step
    block_tables: Int32s  # [R, P], P = blocks of the longest row
    samples: npt.NDArray[np.bool_]  # [R]
    logits_rows: torch.Tensor  # [S] int64 index of each sampling row's last token


class ModelRunner:
    """Owns the runner's table, the sampling columns and the KV cache."""

    def __init__(
        self, model: Llama, *, num_rows: int, num_blocks: int, block_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """Errors: MemoryError when the cache cannot be allocated."""
        self.model = model
        self.block_size = block_size
        self.table = RunnerTable(num_rows, block_size)
        self.sampling = SamplingColumns(num_rows, eos_token_ids)
        self.cache = model.allocate_cache(num_blocks, block_size)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and append what it sampled to the table."""
        self._apply(plan)
        inputs = self.prepare(plan)
        logits = self.forward(inputs)
        rows = plan.rows[inputs.samples]
        token_ids = np.full(len(plan.rows), NO_TOKEN, np.int32)
        if len(rows):
            sampled = self.sample(rows, logits)
            finite = sampled >= 0
            token_ids[inputs.samples] = np.where(finite, sampled, FAILED_TOKEN)
            self.table.append_tokens(rows[finite], sampled[finite])
            self.sampling.append_tokens(rows[finite], sampled[finite])
        return ModelRunnerOutput(plan.step, token_ids)

    def _apply(self, plan: SchedulerOutput) -> None:
        self.table.apply(plan)
        for row in plan.removed_rows.tolist():
            self.sampling.remove(row)
        for new in plan.added:
            self.sampling.add(new)

    def prepare(self, plan: SchedulerOutput) -> StepInputs:
        """Column operations only: no Python per request."""
        table, rows, counts = self.table, plan.rows, plan.num_scheduled_tokens
        samples = table.advance(plan)
        ends = table.num_computed_tokens[rows]
        last = np.cumsum(counts) - 1  # index of each row's last token
        token_rows = np.repeat(rows, counts)
        positions = np.arange(int(counts.sum())) + np.repeat(ends - 1 - last, counts)
        blocks = table.blocks.get(token_rows, positions // self.block_size).astype(np.int64)
        width = int(-(-ends.max() // self.block_size))
        columns = np.minimum(np.arange(width), (table.num_blocks[rows] - 1)[:, None])
        return StepInputs(
            token_ids=torch.from_numpy(table.tokens.get(token_rows, positions).astype(np.int64)),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(blocks * self.block_size + positions % self.block_size),
            num_tokens=counts,
            context_lens=ends,
            block_tables=table.blocks.get(np.repeat(rows, width), columns.reshape(-1)).reshape(-1, width),
            samples=samples,
            logits_rows=torch.from_numpy(last[samples].astype(np.int64)),
        )

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [S, vocab] float32."""
        metadata = self.model.attention_metadata(
            inputs.num_tokens, inputs.context_lens, inputs.block_tables, self.cache
        )
        return self.model.forward(
            inputs.token_ids, inputs.positions, inputs.slots, metadata, self.cache, inputs.logits_rows
        )

    def sample(self, rows: Ints, logits: torch.Tensor) -> Int32s:
        """The next token of each of these rows [S]; negative where its logits are not finite."""
        return sample(logits, self.sampling.inputs(rows, self.table))
