"""CudaModelRunner: a ModelRunner that launches steps on a device and returns a handle for each without waiting."""

import time
from functools import partial
from typing import Any

import numpy as np
import torch

from core.adapters.store import Adapters
from core.execution.executor import Costs
from core.execution.plan import NO_TOKEN, LogprobColumns, ModelRunnerOutput, SchedulerOutput, concat_logprobs
from core.grammars.grammars import Grammars
from core.models.llama import Llama
from core.models.operations.token_adapters import TokenAdapters
from core.models.operations.triton_operations import TritonOperations
from core.models.step import ModelInputs
from core.pooling.pooler import Pooler
from core.pooling.rows import Wanted
from core.runner.cuda_step import CudaStep, Sampled, behind_drafts
from core.runner.decode_graphs import DecodeGraphs, Drafted
from core.runner.device_columns import (
    StepColumns,
    common_splits,
    draft_columns,
    first_tokens,
    step_columns,
    trial_columns,
)
from core.runner.device_features import DeviceFeatures, FeatureBuffers, SentFeatures
from core.runner.device_states import DeviceRowStates, PendingStates
from core.runner.device_tables import DeviceLogits, DeviceTables, normalize_on_device
from core.runner.drafter import Drafter, RanStep, StepStates
from core.runner.feature_rows import KeptFeatures, StepTokens
from core.runner.graph_pool import GraphPool
from core.runner.host_rows import HostRows
from core.runner.mixed_graphs import MixedGraphs
from core.runner.model_runner import ModelRunner
from core.runner.preemption_costs import NUM_TOKENS, measure_costs
from core.runner.state_rows import RowStates
from core.runner.step_durations import Clock, measure_steps, trial_sampling, trial_sizes
from core.runner.trial_loop import LEAST_TOKENS, MOST_TOKENS, LoopDurations, TrialLoop
from core.sampling.candidates import gather_candidates
from core.sampling.logit_edits import apply_edits
from core.sampling.sampler import SamplingInputs, processed_logits
from ipc.options.config import LogprobsMode
from ipc.tables.arrays import NO_INT32S, NO_INTS, Int32s, Ints, Positions, Rows
from ipc.tables.rounding import ceil_div
from kernels.recurrence import StateRows
from kernels.triton.attention_work import (
    SPLIT,
    TritonWork,
    last_seen,
    triton_work,
    whole_prompts,
    work_columns,
)
from kernels.triton.prepare_inputs import prepare_inputs
from kernels.triton.recurrence import DeviceStates
from kernels.triton.sampling import kinds_of, pack_columns, sample_tokens


def tapped_states(model: Llama, inputs: ModelInputs) -> torch.Tensor:
    """Return a step's hidden states [T, hidden], followed by those that are tapped: [T, (1 + taps) * hidden]."""
    if not model.taps:
        hidden: torch.Tensor = model.hidden_states(inputs)
        return hidden
    tapped = list[torch.Tensor]()
    return torch.cat((model.hidden_states(inputs, tapped), *tapped), 1)


#: Number of steps launched back to back to measure how much they overlap.
_OVERLAPPING = 3


class CudaModelRunner(ModelRunner):
    """A ModelRunner whose begin() launches a step before the tokens of the previous step are known on the host.

    The host's table counts a token as soon as the step that samples it is launched. The token's id is written when the
    step's result arrives. The tokens of a row with drafts are counted only then, because the row gets nothing in the
    next step. A step waits for the previous one only if some row has options that edit its logits, since some of these
    (penalties, bad words) read earlier tokens.
    """

    _buffers: FeatureBuffers | None = None  # of captured graphs

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
        most_alone: int = 0,
        grammars: Grammars | None = None,
        shares_blocks: bool = True,
        adapters: Adapters | None = None,
        features: KeptFeatures | None = None,
        pooler: Pooler | None = None,
        drafter: Drafter | None = None,
        states: RowStates | None = None,
    ) -> None:
        """Allocate the KV cache, the swap cache and the device's tables.

        num_swap_blocks: blocks of the host's swap cache; 0 = none. use_graphs: run decoding steps as CUDA graphs (CUDA
        only). most_alone: the most tokens of a step that attention computes one by one; 0 = num_rows. grammars: for
        structured_outputs; None = no request has them. shares_blocks: read blocks that all rows have in common once for
        all of them; no bit depends on it. adapters, features, pooler, drafter, states: see ModelRunner.
        Errors: MemoryError if a cache cannot be allocated.
        """
        super().__init__(
            model,
            num_rows=num_rows,
            num_blocks=num_blocks,
            block_size=block_size,
            eos_token_ids=eos_token_ids,
            logprobs_mode=logprobs_mode,
            grammars=grammars,
            adapters=adapters,
            features=features,
            pooler=pooler,
            drafter=drafter,
            states=states,
        )
        if num_swap_blocks:
            self.swap_cache = operations.allocate_swap_cache(num_swap_blocks, block_size)
        self._llama, self._group_size, self._of_kinds = model, operations.group_size, operations.of_kinds
        self._device, self._width = operations.device, model.config.hidden_size
        self._tapped: torch.Tensor | None = None  # [T, taps * width] of the last step, if the model is tapped
        self._tables = DeviceTables(num_rows, max_model_len, self.cache)
        self._features = DeviceFeatures(self._feature_rows, self._tables, turns=model.config.rope_axes is not None)
        self._shares_blocks = shares_blocks
        self._host = HostRows(self.table, self.sampling, num_rows)
        self._row_states = None if states is None else DeviceRowStates(states, self._tables, self._host)
        self._pending: CudaStep | None = None
        self._nothing = torch.zeros(0, dtype=torch.int32, device=self._device)
        self._unreported = torch.zeros((0, model.vocab_size))  # in host memory
        self.most_alone = max(num_rows, most_alone)
        self.graphs = self.make_graphs(self.most_alone) if use_graphs and self._device.type == "cuda" else None
        self.mixed: MixedGraphs | None = None

    def make_graphs(self, num_tokens: int) -> DecodeGraphs:
        """Return graphs, none captured yet, for decode steps of up to `num_tokens` tokens."""
        self._graph_pool = GraphPool(self._device)
        sizes: dict[str, Any] = {"most_splits": self._most_splits, "pool": self._graph_pool}
        return DecodeGraphs(self.decode, self._device, num_tokens, self._hidden_width, **sizes)

    @property
    def _hidden_width(self) -> int:
        """Return the size of what _forward() returns for a token."""
        return self._width * (1 + len(self._llama.taps))

    @property
    def _most_splits(self) -> int:
        return ceil_div(self._tables.tokens.shape[1] - 1, SPLIT)

    @torch.inference_mode()
    def capture_graphs(self, *, drafts: bool, num_tokens: int) -> None:
        """Capture the graphs of all steps before the first of them: those of prompts, then those that only decode.

        drafts: whether rows may have any. num_tokens: the most tokens of a step.
        """
        if self.graphs is None:
            return
        num_rows = len(self._tables.tokens)
        if self.states is None:
            self._buffers = self._features.buffers()
            self.mixed = MixedGraphs(
                self._compute_mixed,
                self._tables.blocks,
                self._graph_pool,
                num_tokens=num_tokens,
                num_rows=num_rows,
                group_size=self._group_size,
                width=self._hidden_width,
                most_splits=self._most_splits,
                features=self._buffers,
            )
            self.mixed.capture_all()
        self.graphs.capture_all(self.graphs.sizes(num_rows, self.most_alone - num_rows if drafts else 0))
        self._wait()

    @torch.inference_mode()
    def measure_costs(self, used: Clock = time.perf_counter_ns) -> Costs:
        """Return the measured costs of restoring a preempted request, by the clock `used`.

        Call this before the first step, because it writes into free blocks.
        """
        size, device = self.block_size, self._device
        count = min(NUM_TOKENS, (self.cache.num_blocks - 1) * size, self.model.max_model_len)
        counts = np.array([count])
        blocks = np.arange(1, ceil_div(count, size) + 1, dtype=np.int32)[None]
        work = triton_work(counts, counts, blocks, self._group_size, device)
        metadata = self._of_kinds(work)
        token_ids = torch.zeros(count, dtype=torch.int64, device=device)
        slots = torch.arange(size, size + count, device=device)  # from block 1 on
        inputs = ModelInputs(token_ids, work.positions, slots, metadata, self.cache, token_ids[:0])
        if self.states is not None:
            inputs = inputs._replace(
                requests=StateRows(self.states.states, np.zeros(1, np.int64), np.array([0, count]))
            )

        def compute(_: int) -> None:
            self._llama.hidden_states(inputs)
            self._wait()

        # One size only: a device is fast, and each size may compile a kernel.
        return measure_costs(compute, (count, count), self.cache, self.swap_cache, self._wait, used)

    @torch.inference_mode()
    def measure_steps(self, used: Clock = time.perf_counter_ns) -> tuple[int, ...]:
        """Return the durations in ns of steps of 1, 2, 4, ... sampled tokens, until the host has their tokens.

        Call this before the first step. Kernels are compiled and graphs captured before the measurement.
        """
        self._tables.blocks[0] = torch.arange(self._tables.blocks.shape[1], device=self._device) + self._first_block
        for size in trial_sizes(self._most_tokens):
            self._run_trial(size)
        return measure_steps(self._run_trial, self._most_tokens, used, used)

    def measure_drafts(self, used: Clock = time.perf_counter_ns) -> int:
        """Return the duration in ns of the drafter's drafts for one row. `used` also ends the measurement: a group of
        GPUs has one clock, so that all end it after the same step.
        """
        return 0 if self.drafter is None else measure_steps(self._trial_drafts, 1, used, used)[0]

    @torch.inference_mode()
    def measure_overlapping(self, apart: tuple[int, ...], used: Clock = time.perf_counter_ns) -> tuple[int, ...]:
        """Return the durations in ns of consecutive steps: the device's time or the launches', whichever is longer.

        apart: the result of measure_steps().
        """
        more = _OVERLAPPING - 1
        together = measure_steps(lambda size: self._run_trial(size, _OVERLAPPING), self._most_tokens, used)
        return tuple(max(1, (long - short) // more) for long, short in zip(together, apart, strict=False))

    def measure_loop(self, used: Clock = time.perf_counter_ns) -> LoopDurations | None:
        """Return the durations in ns of steps of the engine's loop, or None if the cache has too few tokens for it.

        Call this before the first step. Its row leaves the same traces as a row whose request has ended.
        """
        most = min(self._most_tokens, MOST_TOKENS)
        if most < LEAST_TOKENS:
            return None
        blocks = np.arange(ceil_div(most, self.block_size), dtype=np.int32) + self._first_block
        verified = self.most_alone if self.states is None else min(self.most_alone, 1 + self.states.num_spare)
        loop = TrialLoop(self, blocks, most, verified, used=used)
        durations = loop.measure()
        self._apply(loop.end())
        self.table.clear_columns([0])
        self._pending = None
        return durations

    def _run_trial(self, num_tokens: int, num_steps: int = 1) -> None:
        """Run num_steps steps with num_tokens tokens of row 0, and wait for the last one."""
        columns = trial_columns(num_tokens, self.most_alone, self._group_size)
        saves = None if self.states is None else self.states.trial_saves(num_tokens)
        for _ in range(num_steps):
            hidden, logits_rows = self._launch(columns, saves=saves)
            logits, inputs = self._llama.logits(hidden, logits_rows), trial_sampling(num_tokens)
            self._receive(self._draw(logits, inputs, columns.rows, columns.positions + 1))
        self._wait()

    @property
    def _most_tokens(self) -> int:
        return min(super()._most_tokens, self._tables.tokens.shape[1] - 1)

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
        if not plan.rows.size:  # it encodes or drops images only
            return CudaStep(None, partial(ModelRunnerOutput, plan.step, NO_INT32S))
        if self._pending is not None and self.sampling.num_edited:
            self._pending.result()
        columns, features = self._with_features(plan, self._columns(plan))
        adapters = self._adapter_rows.of_tokens(plan.rows, columns.num_tokens) if self._adapter_rows else None
        saves, pending = (None, None) if self._row_states is None else self._row_states.begin(plan, columns)
        hidden, logits_rows = self._launch(columns, adapters, saves, features)
        logprobs: list[LogprobColumns] = []
        if self.sampling.num_reporting:
            result = self._llama.result(hidden, NO_INTS)
            logprobs += self._prompt_logprobs(plan, columns.num_tokens, columns.context_lens, result)
        sampled, pooling = None, None
        if len(columns.in_plan):
            sampled = self._sample(plan, columns, self._llama.logits(hidden, logits_rows))
        if self.pooling:
            wanted = self.pooling.wanted(plan.rows, columns.num_tokens, columns.context_lens)
            states = self._llama.final_states(hidden, self._tables.send(wanted.tokens)) if len(wanted.tokens) else None
            pooling = wanted, None if states is None else self._receive(states)
        assert self.drafter is None or self._pending is None or self._pending.is_done, "drafts need each step's tokens"
        finish = partial(self._finish, plan, columns, logprobs, sampled, pooling, pending)
        self._pending = CudaStep(self._record_event(), finish)
        return self._pending

    def _finish(
        self,
        plan: SchedulerOutput,
        columns: StepColumns,
        logprobs: list[LogprobColumns],
        sampled: Sampled | None,
        pooling: tuple[Wanted, torch.Tensor | None] | None,
        pending: PendingStates | None,
    ) -> ModelRunnerOutput:
        """Return the output of a step whose results are in host memory, and add its tokens to the table.

        pooling: what the pooling rows want, and its hidden states [n, hidden] float32. pending: of recurrent layers.
        """
        token_ids, counts, candidates = np.full(len(plan.rows), NO_TOKEN, np.int32), None, None
        failures: list[tuple[int, str]] = []
        if sampled is not None:
            token_ids, counts, failed = sampled.take(len(plan.rows))
            logprobs = [*logprobs, *sampled.logprobs(normalized=not self._tells_logits)]
            candidates = sampled.candidates
            failures = self.sampling.failures(sampled.in_plan[failed], sampled.rows[failed])
            sampled.tell(self._host)
        if pending is not None and counts is not None and self._row_states is not None:
            self._row_states.accept(pending, counts)
        drafts: tuple[Int32s | None, Int32s] = (None, NO_INT32S)
        if self.matchers and (self.states is None or self.states.num_spare):
            drafts = self.matchers.drafts(plan.rows)
        if self.drafter is not None:
            drafts = self._with_guesses(self.drafter, RanStep(plan, self._states(columns)), drafts)
        pooled = None
        if pooling is not None:
            wanted, states = pooling
            pooled = self.pooling.collect(wanted, None if states is None else states.numpy())
        return ModelRunnerOutput(
            plan.step, token_ids, concat_logprobs(logprobs), counts, failures, *drafts, pooled, candidates
        )

    @torch.inference_mode()
    def _states(self, columns: StepColumns) -> StepStates | None:
        """Return the hidden states of the last step; None: the model is not tapped."""
        if (tapped := self._tapped) is None:
            return None
        size, positions = self.block_size, columns.positions
        slots = self.table.blocks.get(columns.rows, positions // size) * np.int64(size) + positions % size
        rows, counts = columns.rows[first_tokens(columns)[:-1]].astype(np.int64), columns.num_tokens.astype(np.int64)

        def of_tokens(indices: Ints) -> torch.Tensor:
            return tapped.index_select(0, self._tables.send(indices))

        return StepStates(rows, counts, columns.context_lens, slots, of_tokens)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step to its end."""
        return self.begin(plan).result()

    def _record_event(self) -> torch.cuda.Event | None:
        """Return an event that follows all launched work, or None if everything runs on the host."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _apply(self, plan: SchedulerOutput) -> None:
        super()._apply(plan)
        self._features.begin(plan)
        self._host.leave(plan.removed_rows)
        self._tables.apply(plan, self.table)

    def _columns(self, plan: SchedulerOutput) -> StepColumns:
        """Return the step's columns, and write its drafts into both tables."""
        in_plan = np.flatnonzero(self.table.advance(plan))
        ends = self.table.num_computed_tokens[plan.rows]
        if not len(plan.num_draft_tokens):
            columns = step_columns(plan.rows, plan.num_scheduled_tokens, ends, in_plan)
            if plan.num_common_prefix_blocks and self._shares_blocks:
                return columns._replace(common=common_splits(plan, columns, self.block_size))
            return columns
        columns = draft_columns(plan, ends, in_plan, self.most_alone, self._group_size)
        drafted = np.flatnonzero(plan.num_draft_tokens)
        rows, counts = plan.rows[drafted].astype(np.int64), plan.num_draft_tokens[drafted].astype(np.int64)
        self.table.write_drafts(rows, plan.draft_token_ids, counts)
        is_draft = columns.positions >= np.repeat(ends, plan.num_scheduled_tokens)
        self._tables.write_drafts(columns.rows[is_draft], columns.positions[is_draft], plan.draft_token_ids)
        return columns

    def _with_features(self, plan: SchedulerOutput, columns: StepColumns) -> tuple[StepColumns, SentFeatures | None]:
        """Return the columns, with what tokens see of later ones, and what features make of tokens; None: nothing."""
        features = self._features.of_step(StepTokens(plan.rows, columns.num_tokens, columns.positions))
        wholes = None if features is None else features.wholes
        if not self._llama.config.is_causal:
            wholes = whole_prompts(columns.num_tokens)
        if wholes is None:
            return columns, features
        return columns._replace(lasts=(last_seen(columns.positions, wholes),)), features

    def _launch(
        self,
        columns: StepColumns,
        adapters: TokenAdapters | None = None,
        saves: Ints | None = None,
        features: SentFeatures | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the model over a step; return the hidden states, and the indices of the tokens that sample.

        saves: see DeviceRowStates.begin(). No graph has adapters, because how many tiles of tokens these have differs
        from step to step.
        """
        work = work_columns(*columns.pieces, self._group_size)
        sent = self._tables.send_columns(
            (
                columns.rows,
                columns.positions,
                *work[:3],
                columns.logits_tokens,
                NO_INTS if saves is None else saves,
                *columns.shared,
                *columns.common,
                *columns.lasts,
            )
        )
        rows, positions, alone, tiles, counts, logits_rows, stored, *rest = sent
        given, optional = iter(rest), (columns.shared, columns.common, columns.lasts)
        shared, common, lasts = (next(given) if column else None for column in optional)
        blocks, splits = self._tables.blocks, work.num_splits
        step = TritonWork(rows, positions, blocks, alone, tiles, counts, splits, None, shared, common, lasts)
        after = None if saves is None else stored
        hidden = None
        if adapters is None:
            hidden = self._replayed(step, after, features)
        if hidden is None:
            requests = None if self._row_states is None else self._row_states.of_step(columns, after)
            hidden = self._forward(step, requests, adapters, features)
        if self._llama.taps:
            hidden, self._tapped = hidden.tensor_split((self._width,), 1)
        return hidden, logits_rows

    def _replayed(
        self, work: TritonWork, saves: torch.Tensor | None, features: SentFeatures | None
    ) -> torch.Tensor | None:
        """Return the hidden states [T, hidden] of a step that has a graph; None: it has none.

        saves: see DeviceStates. Of graphs, those of steps with drafts store states. Those of steps with prompts have
        features.
        """
        is_decode = features is None and len(work.decode_tokens) == work.num_rows
        if (graphs := self.graphs) is not None and is_decode:
            shares, has_common = work.shared is not None, work.common is not None
            size = graphs.size_of(work.num_rows, work.num_splits, shares=shares, has_common=has_common)
            if graphs.fits(size) and (shares or saves is None):
                drafted = None
                if work.shared is not None:
                    drafted = Drafted(work.shared, torch.full_like(work.rows, -1) if saves is None else saves)
                return graphs(work.rows, work.positions, work.num_splits, drafted, work.common)
        if self.mixed is not None and (mixed_size := self.mixed.size_of(work, features)) is not None:
            return self.mixed(work, mixed_size, features)
        return None

    def decode(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        drafted: Drafted | None,
        common: torch.Tensor | None,
        num_splits: int,
        hidden: torch.Tensor,
    ) -> None:
        """Compute a token of each of these rows [B] at these positions [B]; write hidden [B, ...] of _forward().

        With drafts a row has several, at consecutive positions. common: see TritonWork. -1 is padding. Everything is on
        the device, so that a CUDA graph can capture it.
        """
        shared, saves = (None, None) if drafted is None else drafted
        alone = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        none, blocks = self._nothing, self._tables.blocks
        work = TritonWork(rows, positions, blocks, alone, none, none, num_splits, None, shared, common)
        requests = None if self._row_states is None else self._row_states.of_decode(rows, saves)
        hidden.copy_(self._forward(work, requests))

    def _compute_mixed(self, work: TritonWork, hidden: torch.Tensor) -> None:
        """Compute a step's hidden states [T, hidden], padding included, with what is on the device."""
        features = None if self._buffers is None else self._buffers.of_graph(work.num_rows)
        hidden.copy_(self._forward(work, None, features=features))

    def _forward(
        self,
        work: TritonWork,
        requests: DeviceStates | None,
        adapters: TokenAdapters | None = None,
        features: SentFeatures | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [T, hidden], followed by those that are tapped [T, taps * hidden].

        work: its tables are the device's block tables. Its window is ignored, because each layer has its own.
        """
        ids, slots = prepare_inputs(work.rows, work.positions, self._tables.tokens, work.tables, self.block_size)
        inputs = ModelInputs(ids, work.positions, slots, self._of_kinds(work), self.cache, self._nothing)
        given, turned = (None, None) if features is None else (features.given, features.turned)
        if turned is None:
            turned = self._features.turned(work.rows, work.positions)
        inputs = inputs._replace(requests=requests, adapters=adapters, given=given, turned=turned)
        return tapped_states(self._llama, inputs)

    def _sample(self, plan: SchedulerOutput, columns: StepColumns, logits: torch.Tensor) -> Sampled:
        """Launch the sampling of a step from the logits [S, V] of its samples."""
        in_plan, offsets = columns.in_plan, columns.offsets
        rows = plan.rows[in_plan]
        searching = self.sampling.searching(rows)
        if len(searching):
            normalize_on_device(logits, searching, self.sampling.search_temperature[rows[searching]], self._tables)
        inputs = self.sampling.inputs(rows, self.table, offsets)
        positions = inputs.position + self.table.num_prompt_tokens[rows]
        reporting = self.sampling.reporting(rows)
        reported = logits[self._tables.send(reporting)] if len(reporting) else self._unreported
        apply_edits(DeviceLogits(logits), inputs.edits)
        if len(reporting) and self._tells_processed:
            reported = torch.from_numpy(processed_logits(logits.cpu().numpy(), reporting, inputs))
        candidates = self._gather(logits, rows, in_plan, searching)
        tokens = self._receive(self._draw(logits, inputs, rows, positions))
        num_top = self.sampling.num_logprobs[rows[reporting]]
        draws = np.ones(len(rows), np.bool_)
        draws[searching] = False
        tenancies = self._host.tenancies[rows]
        sampled = Sampled(
            rows=rows,
            in_plan=in_plan,
            positions=positions,
            tenancies=tenancies,
            tokens=tokens,
            reporting=reporting,
            num_top=num_top,
            reported=self._receive(reported) if len(reporting) else reported,
            draws=draws,
            candidates=candidates,
        )
        if offsets is not None:
            sampled = behind_drafts(sampled, plan, offsets)
        self._host.count(sampled.counted)
        return sampled

    def _gather(self, logits: torch.Tensor, rows: Int32s, in_plan: Ints, searching: Ints) -> LogprobColumns | None:
        """Return the candidates of beam search rows. If there are any, this waits for the device."""
        if not len(searching):
            return None
        owners, values = rows[searching], logits[self._tables.send(searching)].cpu().numpy()
        return gather_candidates(
            values,
            np.arange(len(owners)),
            self.sampling.num_candidates[owners],
            in_plan[searching],
            self.table.num_tokens[owners],
        )

    def _draw(self, logits: torch.Tensor, inputs: SamplingInputs, rows: Rows, positions: Positions) -> torch.Tensor:
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
        """Return a copy in host memory. It is valid after the step's event."""
        if tensor.device.type != "cuda" or not tensor.numel():
            return tensor.cpu().clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
