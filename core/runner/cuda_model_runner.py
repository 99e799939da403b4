"""CudaModelRunner: a ModelRunner that launches steps on a device and returns a handle for each, without waiting."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from core.execution.executor import Costs
from core.execution.plan import (
    FAILED_TOKEN,
    NO_TOKEN,
    LogprobColumns,
    ModelRunnerOutput,
    SchedulerOutput,
    concat_logprobs,
)
from core.grammars.grammars import Grammars
from core.models.llama import Llama
from core.models.step import ModelInputs
from core.models.triton_operations import TritonOperations
from core.runner.decode_graphs import DecodeGraphs
from core.runner.device_logits import DeviceLogits
from core.runner.device_tables import DeviceTables
from core.runner.model_runner import ModelRunner
from core.runner.preemption_costs import NUM_TOKENS, measure_costs
from core.sampling.candidates import gather_candidates
from core.sampling.logit_edits import apply_edits
from core.sampling.logprobs import gather_logprobs
from core.sampling.sampler import SamplingInputs, processed_logits
from ipc.arrays import NO_INTS, AnyInts, Bools, Int32s, Ints, Positions, Rows, TokenIds
from ipc.config import LogprobsMode
from ipc.rounding import ceil_div
from kernels.triton.attention_work import TritonWork, triton_work, work_columns
from kernels.triton.prepare_inputs import prepare_inputs
from kernels.triton.sampling import kinds_of, pack_columns, sample_tokens


class _Batch(NamedTuple):
    """A step's T tokens of R rows, packed row after row, in the host's memory."""

    num_tokens: Int32s  # [R]
    context_lens: Ints  # [R]
    rows: Rows  # [T] table row of each token
    positions: Ints  # [T]
    samples: Bools  # [R]
    last: AnyInts  # [R] index of each row's last token


@dataclass(frozen=True)
class _Sampled:
    """The tokens and logits that a step samples for S rows, while they are copied to the host."""

    rows: Int32s
    positions: Ints  # [S] of the new tokens in their rows
    tenancies: Ints  # [S] of the rows, when the step was launched
    tokens: torch.Tensor  # [S] int32, host memory; valid after the event
    reporting: Ints  # indices of the S rows that report log probabilities
    num_top: Ints  # [len(reporting)]
    reported: torch.Tensor  # [len(reporting), vocab] their logits, host memory; valid after the event
    draws: Bools  # [S] whether the row gets the token; rows of beam searches do not
    candidates: LogprobColumns | None  # of rows of beam searches


class CudaStep:
    """The handle of a step in flight."""

    def __init__(
        self,
        runner: "CudaModelRunner",
        plan: SchedulerOutput,
        samples: Bools,
        logprobs: list[LogprobColumns],
        sampled: _Sampled | None,
    ) -> None:
        self._runner, self._number, self._samples = runner, plan.step, samples
        self._logprobs, self._sampled = logprobs, sampled
        self._event = runner.record_event()
        self._output: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        """Return the step's output. The first call waits for the device."""
        if self._output is None:
            if self._event is not None:
                self._event.synchronize()
            self._output = self._finish()
        return self._output

    def _finish(self) -> ModelRunnerOutput:
        token_ids = np.full(len(self._samples), NO_TOKEN, np.int32)
        sampled, logprobs, candidates = self._sampled, self._logprobs, None
        if sampled is not None:
            tokens = sampled.tokens.numpy()
            kept = np.where(sampled.draws, tokens, NO_TOKEN)
            token_ids[self._samples] = np.where(tokens >= 0, kept, FAILED_TOKEN)
            candidates = sampled.candidates
            known = np.maximum(tokens, 0)
            if len(which := sampled.reporting):
                in_plan = np.flatnonzero(self._samples)[which]
                columns = known[which], sampled.num_top, in_plan, sampled.positions[which]
                normalized = not self._runner.tells_logits
                logprobs = [*logprobs, gather_logprobs(sampled.reported.numpy(), *columns, normalized=normalized)]
            draws = sampled.draws
            self._runner.learn(sampled.rows[draws], sampled.positions[draws], sampled.tenancies[draws], known[draws])
        return ModelRunnerOutput(self._number, token_ids, concat_logprobs(logprobs), candidates=candidates)


class CudaModelRunner(ModelRunner):
    """A ModelRunner whose begin() launches a step before the tokens of the previous step are known on the host.

    The host's table counts a token as soon as the step that samples it is launched. The token's id is written when the
    step's result arrives. A step waits for the previous one only while some row has options that edit its logits, since
    some of these (penalties, bad words) read earlier tokens.
    """

    def __init__(
        self,
        model: Llama,
        operations: TritonOperations,
        *,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        logprobs_mode: LogprobsMode = "raw_logprobs",
        num_swap_blocks: int = 0,
        use_graphs: bool = True,
        grammars: Grammars | None = None,
    ) -> None:
        """Allocate the KV cache, the swap cache and the device's tables.

        num_swap_blocks: blocks of the host's swap cache; 0 = none. use_graphs: run decoding steps as CUDA graphs (on
        CUDA only). grammars: of structured_outputs; None = no request has them. Errors: MemoryError when a cache cannot
        be allocated.
        """
        super().__init__(
            model,
            num_rows=num_rows,
            num_blocks=num_blocks,
            block_size=block_size,
            eos_token_ids=eos_token_ids,
            logprobs_mode=logprobs_mode,
            grammars=grammars,
        )
        if num_swap_blocks:
            self.swap_cache = operations.allocate_swap_cache(num_swap_blocks, block_size)
        self._llama, self._group_size = model, operations.group_size
        self._device = operations.device
        self.tells_logits = self._tells_logits
        self._tables = DeviceTables(num_rows, max_model_len, self.cache)
        self._tenancy = np.zeros(num_rows, np.int64)  # requests that have left each row
        self._pending: CudaStep | None = None
        self._nothing = torch.zeros(0, dtype=torch.int32, device=self._device)
        self._graphs = self._make_graphs(num_rows) if use_graphs and self._device.type == "cuda" else None

    def _make_graphs(self, num_rows: int) -> DecodeGraphs:
        return DecodeGraphs(self._decode, self._device, num_rows, self._llama.config.hidden_size)

    @torch.inference_mode()
    def measure_costs(self) -> Costs:
        """Return the measured costs of restoring a preempted request.

        It must run before the first step, because it writes into free blocks.
        """
        size, device = self.block_size, self._device
        count = min(NUM_TOKENS, (self.cache.num_blocks - 1) * size, self.model.max_model_len)
        counts = np.array([count])
        blocks = np.arange(1, ceil_div(count, size) + 1, dtype=np.int32)[None]
        work = triton_work(counts, counts, blocks, self._group_size, device)
        metadata = tuple(work._replace(window=window) for window in self._llama.windows)
        token_ids = torch.zeros(count, dtype=torch.int64, device=device)
        slots = torch.arange(size, size + count, device=device)  # from block 1 on
        inputs = ModelInputs(token_ids, work.positions, slots, metadata, self.cache, token_ids[:0])

        def compute() -> None:
            self._llama.hidden_states(inputs)
            self._wait()

        return measure_costs(compute, count, self.cache, self.swap_cache, self._wait)

    def _wait(self) -> None:
        """Wait until the device has finished all launched work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def begin(self, plan: SchedulerOutput) -> CudaStep:
        """Launch one step and return its handle.

        The device writes the sampled tokens to its own tables. The host receives them from the handle. Results must be
        taken in the order of their steps.
        """
        self._apply(plan)
        if self._pending is not None and self.sampling.num_edited:
            self._pending.result()
        batch = self._batch(plan)
        hidden, logits_rows = self._launch(batch)
        logprobs: list[LogprobColumns] = []
        if self.sampling.num_reporting:
            result = self._llama.result(hidden, NO_INTS)
            logprobs += self._prompt_logprobs(plan, batch.num_tokens, batch.context_lens, result)
        sampled = None
        if batch.samples.any():
            in_plan = np.flatnonzero(batch.samples)
            sampled = self._sample(plan.rows[in_plan], in_plan, self._llama.logits(hidden, logits_rows))
        self._pending = CudaStep(self, plan, batch.samples, logprobs, sampled)
        return self._pending

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step to its end."""
        return self.begin(plan).result()

    def record_event(self) -> torch.cuda.Event | None:
        """Return an event that follows all launched work; None where everything runs on the host."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def learn(self, rows: Int32s, positions: Positions, tenancies: Ints, tokens: TokenIds) -> None:
        """Write sampled tokens [n] into the host's table, at these rows [n] and positions [n].

        tenancies [n]: of the rows when their step was launched. Tokens of a row that its request has left since are
        dropped.
        """
        here = self._tenancy[rows] == tenancies
        self.table.tokens.set(rows[here], positions[here], tokens[here])
        self.sampling.append_tokens(rows[here], tokens[here])

    def _apply(self, plan: SchedulerOutput) -> None:
        super()._apply(plan)
        self._tenancy[plan.removed_rows] += 1
        self._tables.apply(plan, self.table)

    def _batch(self, plan: SchedulerOutput) -> _Batch:
        rows, counts = plan.rows, plan.num_scheduled_tokens
        samples = self.table.advance(plan)
        ends = self.table.num_computed_tokens[rows]
        last = np.cumsum(counts) - 1
        positions = np.arange(int(last[-1]) + 1) + np.repeat(ends - 1 - last, counts)
        return _Batch(counts, ends, np.repeat(rows, counts), positions, samples, last)

    def _launch(self, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the model over a batch; return the hidden states, and the indices of the tokens that sample."""
        work = work_columns(batch.num_tokens, batch.context_lens, self._group_size)
        columns = (batch.rows, batch.positions, *work[:3], batch.last[batch.samples])
        rows, positions, alone, tiles, counts, logits_rows = self._tables.send_columns(columns)
        if self._graphs is not None and len(alone) == len(rows) and self._graphs.fits(len(rows)):
            hidden = self._graphs(rows, positions, work.num_splits)
        else:
            blocks = self._tables.blocks
            hidden = self._forward(TritonWork(rows, positions, blocks, alone, tiles, counts, work.num_splits))
        return hidden, logits_rows

    def _decode(self, rows: torch.Tensor, positions: torch.Tensor, num_splits: int, hidden: torch.Tensor) -> None:
        """Compute one token of each of these rows [B] at these positions [B]; write hidden [B, hidden].

        -1 is padding. Everything is on the device, so that a CUDA graph can capture it.
        """
        alone = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        none, blocks = self._nothing, self._tables.blocks
        hidden.copy_(self._forward(TritonWork(rows, positions, blocks, alone, none, none, num_splits)))

    def _forward(self, work: TritonWork) -> torch.Tensor:
        """Return the hidden states [T, hidden].

        work: its tables are the device's block tables. Its window is ignored: each layer has its own.
        """
        ids, slots = prepare_inputs(work.rows, work.positions, self._tables.tokens, work.tables, self.block_size)
        metadata = tuple(work._replace(window=window) for window in self._llama.windows)
        inputs = ModelInputs(ids, work.positions, slots, metadata, self.cache, self._nothing)
        hidden: torch.Tensor = self._llama.hidden_states(inputs)
        return hidden

    def _sample(self, rows: Int32s, in_plan: Ints, logits: torch.Tensor) -> _Sampled:
        """Launch the sampling of these rows [S] from logits [S, V]. in_plan [S]: index of each in the plan's rows."""
        searching = self.sampling.searching(rows)
        self._normalize(logits, rows, searching)
        positions = self.table.num_tokens[rows]
        inputs = self.sampling.inputs(rows, self.table)
        reporting = self.sampling.reporting(rows)
        reported = logits[self._tables.send(reporting)] if len(reporting) else logits[:0]
        apply_edits(DeviceLogits(logits), inputs.edits)
        if len(reporting) and self._tells_processed:
            reported = torch.from_numpy(processed_logits(logits.cpu().numpy(), reporting, inputs))
        candidates = self._gather(logits, rows, in_plan, searching)
        tokens = self._draw(logits, inputs, rows, positions)
        num_top = self.sampling.num_logprobs[rows[reporting]]
        draws = np.ones(len(rows), np.bool_)
        draws[searching] = False
        drawing = rows[draws]
        self.table.append_tokens(drawing, np.zeros(len(drawing), np.int32))  # placeholders; learn() writes the tokens
        columns = rows, positions, self._tenancy[rows], self._receive(tokens), reporting, num_top
        return _Sampled(*columns, self._receive(reported), draws, candidates)

    def _normalize(self, logits: torch.Tensor, rows: Int32s, searching: Ints) -> None:
        """Turn the logits of rows of beam searches into log probabilities, in place: normalize() on the device."""
        if len(searching):
            temperatures = self.sampling.search_temperature[rows[searching]]
            divisors = self._tables.send(np.where(temperatures > 0, temperatures, 1).astype(np.float32))
            which = self._tables.send(searching)
            logits[which] = torch.log_softmax(logits[which] / divisors[:, None], -1)

    def _gather(self, logits: torch.Tensor, rows: Int32s, in_plan: Ints, searching: Ints) -> LogprobColumns | None:
        """Return the candidates of rows of beam searches; it waits for the device where there are any."""
        if not len(searching):
            return None
        owners, values = rows[searching], logits[self._tables.send(searching)].cpu().numpy()
        columns = self.sampling.num_candidates[owners], in_plan[searching], self.table.num_tokens[owners]
        return gather_candidates(values, np.arange(len(owners)), *columns)

    def _draw(self, logits: torch.Tensor, inputs: SamplingInputs, rows: Int32s, positions: Positions) -> torch.Tensor:
        words = pack_columns(
            temperature=inputs.temperature,
            top_k=inputs.top_k,
            top_p=inputs.top_p,
            min_p=inputs.min_p,
            seed=inputs.seed,
            position=inputs.position,
            choice=inputs.choice,
        )
        sent = self._tables.send(np.concatenate((words, rows[None], positions[None])).astype(np.int32))
        tokens = sample_tokens(logits, sent[:-2], kinds_of(words))
        self._tables.append(sent[-2], sent[-1], tokens)
        return tokens

    def _receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in the host's memory; it is valid after the step's event."""
        if tensor.device.type != "cuda" or not tensor.numel():
            return tensor.cpu().clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
