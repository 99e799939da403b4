"""ModelRunner: turns plans into model inputs, as columns, and samples tokens from the logits."""

import time
from typing import Any

import numpy as np

from core.adapters.store import Adapters
from core.execution.executor import Costs
from core.execution.plan import (
    FAILED_TOKEN,
    NO_TOKEN,
    LogprobColumns,
    ModelRunnerOutput,
    PooledColumns,
    SchedulerOutput,
    concat_logprobs,
)
from core.execution.runner_table import RunnerTable
from core.grammars.grammars import Grammars
from core.grammars.matchers import RowMatchers
from core.models.interface import Model
from core.models.operations.token_adapters import TokenAdapters
from core.models.step import ONCE, ModelInputs, StepResult, TappedResult
from core.pooling.pooler import Pooler
from core.pooling.rows import PoolingRows
from core.runner.accepted import accepted
from core.runner.drafter import Drafter, RanStep, StepStates, merged
from core.runner.feature_rows import FeatureRows, KeptFeatures
from core.runner.preemption_costs import FIRST_TOKENS, NUM_TOKENS, measure_costs
from core.runner.state_rows import RowStates
from core.runner.step_durations import Clock, measure_steps, trial_sampling
from core.runner.step_inputs import InputMaker, StepInputs
from core.sampling.candidates import NOT_DRAWN, gather_candidates, normalize
from core.sampling.columns import SamplingColumns, positions_of
from core.sampling.first_tokens import sample_rows
from core.sampling.logit_edits import edit_groups
from core.sampling.logprobs import gather_logprobs
from core.sampling.sampler import processed_logits, sample, sample_greedily
from ipc.options.config import LogprobsMode
from ipc.tables.arrays import NO_INT32S, AnyInts, Bools, Floats, Int32s, Ints, Rows
from ipc.tables.rounding import ceil_div

#: Number of prompt tokens whose logits are computed at once for log probabilities. It bounds memory: 4 bytes per logit.
_PIECE = 32


class ModelRunner:
    """Owns the runner's table, the sampling columns and the KV caches, and runs one step per call."""

    def __init__(
        self,
        model: Model,
        *,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        eos_token_ids: tuple[int, ...],
        logprobs_mode: LogprobsMode = "raw_logprobs",
        num_swap_blocks: int = 0,
        grammars: Grammars | None = None,
        drafter: Drafter | None = None,
        pooler: Pooler | None = None,
        adapters: Adapters | None = None,
        features: KeptFeatures | None = None,
        states: RowStates | None = None,
        num_page_blocks: int = 0,
    ) -> None:
        """Allocate the table, the columns and the caches.

        0 and None mean none. num_swap_blocks: of the cache to which preempted requests are copied. grammars: for
        structured_outputs. drafter: guesses tokens with a model. states: for recurrent layers. num_page_blocks: blocks
        per page, if layers with a window have their own blocks.
        Errors: MemoryError if a cache cannot be allocated.
        """
        self.model = model
        self._tells_processed = logprobs_mode.startswith("processed")
        self._tells_logits = logprobs_mode.endswith("logits")
        self.block_size = block_size
        self.table = RunnerTable(num_rows, block_size, num_others=int(num_page_blocks > 0))
        self._inputs = InputMaker(self.table, block_size)
        self.matchers = None if grammars is None else RowMatchers(grammars, num_rows)
        masks = None if model.sampler is None else model.sampler.token_masks
        self.pooling = PoolingRows(pooler)
        self._adapter_rows = AdapterRows(adapters)
        self._feature_rows = FeatureRows(features)
        self.states = states
        groups = edit_groups(num_rows, eos_token_ids, self.matchers, masks)
        self.sampling = SamplingColumns(num_rows, groups, len(eos_token_ids))
        self._candidates: LogprobColumns | None = None  # of this step; see ModelRunnerOutput
        self._failures: list[tuple[int, str]] = []  # of this step; see ModelRunnerOutput
        self.cache = model.allocate_cache(num_blocks, block_size)
        self._first_block = max(1, num_page_blocks)
        self.swap_cache = model.allocate_cache(num_swap_blocks, block_size) if num_swap_blocks else None
        self.drafter = drafter

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step, append the sampled tokens to the table and return them."""
        self._apply(plan)
        if not plan.rows.size:  # it encodes or drops images only
            return ModelRunnerOutput(plan.step, NO_INT32S)
        self.model.wake()
        inputs = self.prepare(plan)
        result = self.forward(inputs)
        logprobs: list[LogprobColumns] = []
        if self.sampling.num_reporting:
            logprobs += self._prompt_logprobs(plan, inputs.num_tokens, inputs.context_lens, result)
        pooled: PooledColumns | None = None
        if self.pooling:
            wanted = self.pooling.wanted(inputs.rows, inputs.num_tokens, inputs.context_lens)
            pooled = self.pooling.collect(wanted, result.hidden_of(wanted.tokens) if len(wanted.tokens) else None)
        if inputs.sample_rows is not None and (offsets := inputs.sample_offsets) is not None:
            token_ids, counts = self._append_several(inputs, inputs.sample_rows, offsets, result, logprobs)
            self.accept(plan, counts)
            return self._output(plan, inputs, result, token_ids, logprobs, pooled, counts)
        token_ids = self._append_sampled(plan, inputs, result, logprobs) if inputs.num_samples else _no_tokens(plan)
        return self._output(plan, inputs, result, token_ids, logprobs, pooled)

    def accept(self, plan: SchedulerOutput, counts: Int32s) -> None:
        """Count the drafts of the last step that were right. counts [R]: how many tokens each of its rows yields."""
        self.table.accept(plan, counts)
        if self.states is not None and self.states.drafted is not None:
            self.states.accept(self.states.drafted, counts)

    def _output(
        self,
        plan: SchedulerOutput,
        inputs: StepInputs,
        result: StepResult,
        token_ids: Int32s,
        logprobs: list[LogprobColumns],
        pooled: PooledColumns | None,
        counts: Int32s | None = None,
    ) -> ModelRunnerOutput:
        """Return the step's result, with the drafts forced by grammars and those of the drafter."""
        failures, self._failures = self._failures, []
        drafts: tuple[Int32s | None, Int32s] = (None, NO_INT32S)
        if self.matchers and (self.states is None or self.states.num_spare):
            drafts = self.matchers.drafts(plan.rows)
        if self.drafter is not None:
            drafts = self._with_guesses(self.drafter, RanStep(plan, _states(inputs, result)), drafts)
        candidates, self._candidates = self._candidates, None
        return ModelRunnerOutput(
            plan.step, token_ids, concat_logprobs(logprobs), counts, failures, *drafts, pooled, candidates
        )

    def _with_guesses(
        self, drafter: Drafter, step: RanStep, forced: tuple[Int32s | None, Int32s]
    ) -> tuple[Int32s, Int32s]:
        """Return the drafts forced by grammars, and the drafter's for rows without any."""
        guessed = drafter.propose(step, self.table, self.sampling)
        return guessed if forced[0] is None else merged(forced[0], forced[1], *guessed)

    def _append_sampled(
        self, plan: SchedulerOutput, inputs: StepInputs, result: StepResult, logprobs: list[LogprobColumns]
    ) -> Int32s:
        """Return the tokens [R] of the plan's rows: NO_TOKEN if none was sampled, FAILED_TOKEN if sampling failed.

        The sampled tokens are appended to the table, and their log probabilities to logprobs.
        """
        logits, everywhere = result.logits, inputs.num_samples == len(inputs.rows)
        rows = inputs.rows if everywhere else inputs.rows[inputs.samples]
        reporting = self.sampling.reporting(rows)
        reported = logits[reporting] if len(reporting) else logits  # a copy, because the sampler overwrites its input
        sampled = self.draw(rows, result, inputs.samples)
        if len(reporting):
            if self._tells_processed:
                columns = self.sampling.parameters(rows, positions_of(rows, self.table, None))
                reported = processed_logits(logits, reporting, columns)
            logprobs.append(self._sampled_logprobs(inputs, rows, sampled, reporting, reported))
        token_ids, is_finite = sampled, min(sampled.tolist()) >= 0
        if not everywhere:
            (token_ids := _no_tokens(plan))[inputs.samples] = sampled
        if everywhere and is_finite:
            self._inputs.append(rows, sampled)
        else:
            finite, is_failed = sampled >= 0, (sampled < 0) & (sampled != NOT_DRAWN)
            failed = np.flatnonzero(inputs.samples)[is_failed]
            token_ids = np.where(token_ids == NOT_DRAWN, np.int32(NO_TOKEN), token_ids)
            token_ids[failed] = FAILED_TOKEN
            self._failures += self.sampling.failures(failed, rows[is_failed])
            rows, sampled = rows[finite], sampled[finite]
            self.table.append_tokens(rows, sampled)
        self.sampling.append_tokens(rows, sampled)
        return token_ids

    def _append_several(
        self,
        inputs: StepInputs,
        in_plan: Ints,
        offsets: Ints,
        result: StepResult,
        logprobs: list[LogprobColumns],
    ) -> tuple[Int32s, Int32s]:
        """Return (token_ids, counts [R]) of a step in which rows have several samples.

        token_ids: the accepted samples, row after row. The table and logprobs are extended as by _append_sampled().
        in_plan, offsets [S]: sample_rows and sample_offsets of StepInputs. Log probabilities of samples that are not
        accepted are reported too; the scheduler drops them.
        """
        rows, table, logits = inputs.rows[in_plan], self.table, result.logits
        reporting = self.sampling.reporting(rows)
        reported = logits[reporting] if len(reporting) else logits  # a copy, because the sampler overwrites its input
        sampled = self.draw(rows, result, inputs.samples, in_plan, offsets)
        if len(reporting):
            if self._tells_processed:
                columns = self.sampling.parameters(rows, positions_of(rows, self.table, offsets))
                reported = processed_logits(logits, reporting, columns)
            positions = (table.num_tokens[rows] + offsets)[reporting]
            logprobs.append(
                gather_logprobs(
                    reported,
                    np.maximum(sampled[reporting], 0),
                    self.sampling.num_logprobs[rows[reporting]],
                    in_plan[reporting],
                    positions,
                    normalized=not self._tells_logits,
                )
            )
        kept = accepted(rows, offsets, sampled, table) & (sampled != NOT_DRAWN)
        tokens, owners = sampled[kept], in_plan[kept]
        counts = np.bincount(owners, minlength=len(inputs.rows))
        finite = tokens >= 0
        self._failures += self.sampling.failures(owners[~finite], inputs.rows[owners[~finite]])
        known = np.bincount(owners[finite], minlength=len(inputs.rows))
        going = known > 0
        table.append_tokens(inputs.rows[going], tokens[finite], known[going])
        self.sampling.append_tokens(inputs.rows[going], tokens[finite], known[going])
        return np.where(finite, tokens, FAILED_TOKEN).astype(np.int32), counts.astype(np.int32)

    def measure_costs(self) -> Costs:
        """Return the measured costs of restoring a preempted request.

        Call this before the first step, because it writes into free blocks. No block is read before it is written.
        """
        most = min(NUM_TOKENS, self._most_tokens)

        def compute(num_tokens: int) -> None:
            self.forward(self._trial_inputs(num_tokens, 0))

        return measure_costs(compute, (min(FIRST_TOKENS, most), most), self.cache, self.swap_cache)

    def warm_up(self, num_tokens: int) -> int:
        """Run a step of so many tokens, or as many as fit, and return its duration in ns. Call this before the first
        step.
        """
        inputs = self._trial_inputs(min(num_tokens, self._most_tokens), 0)
        begin = time.perf_counter_ns()
        self.forward(inputs)
        return time.perf_counter_ns() - begin

    def measure_steps(self, used: Clock = time.perf_counter_ns) -> tuple[int, ...]:
        """Return the durations in ns of steps of 1, 2, 4, ...

        sampled tokens, by the clock `used`. Call this before any step.
        """
        return measure_steps(self._trial_step, self._most_tokens, used)

    def _trial_step(self, num_tokens: int) -> None:
        result = self.forward(self._trial_inputs(num_tokens, num_tokens))
        sample(result.logits, trial_sampling(num_tokens), self.model.sampler, result.largest)

    def measure_drafts(self, used: Clock = time.perf_counter_ns) -> int:
        """Return the duration in ns of the drafter's drafts for one row, by the clock `used`; 0 without a drafter."""
        return 0 if self.drafter is None else measure_steps(self._trial_drafts, 1, used)[0]

    def _trial_drafts(self, _: int) -> None:
        assert self.drafter is not None, "there is something to measure"
        self.drafter.step(np.zeros(1, np.int64), self.table, self.sampling)

    @property
    def _most_tokens(self) -> int:
        """Return how many tokens a trial step can have: limited by the cache and by the model's positions."""
        return min((self.cache.num_blocks_of_all - self._first_block) * self.block_size, self.model.max_model_len)

    def _trial_inputs(self, count: int, num_samples: int) -> StepInputs:
        """Return inputs for `count` tokens of one row, from the first block on. The last num_samples get logits."""
        size, first, positions = self.block_size, self._first_block, np.arange(count)
        return StepInputs(
            rows=np.zeros(1, np.int64),
            token_ids=positions % self.model.vocab_size,
            positions=positions,
            slots=positions + first * size,
            num_tokens=np.array([count]),
            context_lens=np.array([count]),
            block_tables=np.arange(first, ceil_div(count, size) + first, dtype=np.int32)[None],
            samples=np.zeros(1, np.bool_),
            num_samples=num_samples,
            logits_rows=np.arange(count - num_samples, count),
        )

    def apply_blocks(self, plan: SchedulerOutput) -> None:
        """Apply a plan's rows, adapters, blocks and copies to the tables, the caches and the recurrent states."""
        self.table.apply(plan)
        self._adapter_rows.apply(plan)
        if self.swap_cache is not None:
            self.cache.copy_blocks(plan.swapped_out_blocks, self.swap_cache, plan.swapped_out_slots)
        if len(plan.copied_blocks):
            self.cache.copy_blocks(plan.copied_blocks, self.cache, plan.copied_to)
        if self.swap_cache is not None:
            self.swap_cache.copy_blocks(plan.swapped_in_slots, self.cache, plan.swapped_in_blocks)
        if self.states is not None:
            self.states.begin(plan)

    def _apply(self, plan: SchedulerOutput) -> None:
        self.apply_blocks(plan)
        if self.drafter is not None:
            self.drafter.apply(plan)
        for row in plan.removed_rows.tolist():
            self.sampling.remove(row)
            self.pooling.remove(row)
        for new in plan.added:
            self.sampling.add(new)
        for pooling in plan.added_pooling:
            self.pooling.add(pooling)
        if self._feature_rows.of_row or plan.features or plan.freed_encoder_inputs or plan.image_parts:
            self._feature_rows.apply(plan)

    def prepare(self, plan: SchedulerOutput) -> StepInputs:
        """Return the model's inputs for a plan that has already been applied to the table."""
        return self._inputs(plan)

    def forward(self, inputs: StepInputs) -> StepResult:
        """Run the model on a step's tokens. The result is valid until the next step."""
        given = self._feature_rows.of_step(inputs) if self._feature_rows.of_row else None
        turned = self._feature_rows.positions_of(inputs) if self._feature_rows.grids else None
        windows = inputs.others[0] if inputs.others else None
        attention = self.model.attention_metadata(
            inputs.num_tokens,
            inputs.context_lens,
            inputs.block_tables,
            self.cache,
            inputs.generation,
            None if given is None else given.wholes,
            windows and windows.block_tables,
        )
        return self.model.forward(
            ModelInputs(
                inputs.token_ids if given is None else given.token_ids,
                inputs.positions,
                inputs.slots,
                attention,
                self.cache,
                inputs.logits_rows,
                inputs.generation if given is None and turned is None else ONCE,  # arrays of this step only
                self._adapter_rows.of_step(inputs) if self._adapter_rows else None,
                None if given is None else given.rows,
                None if self.states is None else self.states.of_step(inputs),
                windows and windows.slots,
                turned,
            )
        )

    def _prompt_logprobs(
        self, plan: SchedulerOutput, num_tokens: AnyInts, context_lens: AnyInts, result: StepResult
    ) -> list[LogprobColumns]:
        """Return log probabilities of the prompt tokens that follow this step's tokens, for the rows that want them.

        They are computed in pieces, because their logits take many times the memory of the batch's. They are raw log
        probabilities in every logprobs_mode, as in vLLM.
        """
        wanted = self.sampling.num_prompt_logprobs[plan.rows]
        group = np.flatnonzero(wanted >= 0)
        if not len(group):
            return []
        table, rows = self.table, plan.rows[group]
        first = (np.cumsum(num_tokens) - num_tokens)[group]  # index of each row's first token
        starts = context_lens[group] - num_tokens[group]
        ends = np.minimum(context_lens[group], table.num_prompt_tokens[rows] - 1)
        counts = np.maximum(ends - starts, 0)
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        index = np.repeat(first, counts) + offsets
        positions = np.repeat(starts, counts) + offsets + 1
        tokens = table.tokens.get(np.repeat(rows, counts), positions)
        columns = (tokens, np.repeat(wanted[group], counts), np.repeat(group, counts), positions)
        return [
            gather_logprobs(
                result.logits_of(index[piece : piece + _PIECE]),
                *(column[piece : piece + _PIECE] for column in columns),
            )
            for piece in range(0, len(index), _PIECE)
        ]

    def _sampled_logprobs(
        self, inputs: StepInputs, rows: Rows, sampled: Int32s, reporting: Ints, reported: Floats
    ) -> LogprobColumns:
        """Return the log probabilities of the sampled tokens.

        reporting: indices of the sampling rows that report. reported [len(reporting), vocab]: their logits, raw or
        processed. The entry of a failed row has an arbitrary token; the scheduler drops it.
        """
        tokens = np.maximum(sampled[reporting], 0)
        num_top = self.sampling.num_logprobs[rows[reporting]]
        in_plan = np.flatnonzero(inputs.samples)[reporting]
        positions = self.table.num_tokens[rows[reporting]]
        return gather_logprobs(reported, tokens, num_top, in_plan, positions, normalized=not self._tells_logits)

    def draw(
        self,
        rows: Rows,
        result: StepResult,
        samples: Bools,
        in_plan: Ints | None = None,
        offsets: Ints | None = None,
    ) -> Int32s:
        """Return the next token of each of these rows, like sample(), but NOT_DRAWN for beam search rows.

        The candidates of these rows are kept for the output. samples [R]: which of the plan's rows sample. in_plan [S]:
        index of each sample's row in the plan; None: each of them samples once.
        """
        if not self.sampling.num_searching:
            return self.sample(rows, result, offsets)
        which, logits = self.sampling.searching(rows), result.logits
        normalize(logits, which, self.sampling.search_temperature[rows[which]])
        sampled = self.sample(rows, result, offsets)
        which = which[sampled[which] >= 0]
        if len(which):
            owners, places = rows[which], np.flatnonzero(samples) if in_plan is None else in_plan
            self._candidates = gather_candidates(
                logits, which, self.sampling.num_candidates[owners], places[which], self.table.num_tokens[owners]
            )
        sampled[which] = NOT_DRAWN
        return sampled

    def sample(self, rows: Rows, result: StepResult, offsets: Ints | None = None) -> Int32s:
        """Return the next token [S] of each of these rows [S]; negative if the row's logits are not finite.

        result: has the logits of these rows, in the same order. offsets [S]: for samples after drafts, see
        SamplingColumns.inputs().
        """
        sampling, largest = self.sampling, result.largest
        if not (sampling.num_drawing or sampling.num_edited):
            # The model's next step overwrites its result.
            return sample_greedily(result.logits, self.model.sampler) if largest is None else largest.copy()
        keeps = bool(sampling.num_searching or (self._tells_processed and sampling.num_reporting))
        return sample_rows(
            sampling, self.table, rows, result.logits, largest, self.model.sampler, offsets, keeps_logits=keeps
        )


def _no_tokens(plan: SchedulerOutput) -> Int32s:
    return np.full(len(plan.rows), NO_TOKEN, np.int32)


# AdapterRows: the adapters of the batch's rows, and of each step's tokens.


class AdapterRows:
    """The packed adapters of rows that have one. adapters: None = no request can have one."""

    def __init__(self, adapters: Adapters | None) -> None:
        self._adapters = adapters
        self._of_row: dict[int, Any] = {}
        self._generation = ONCE  # generation of the inputs for which `_last` was made
        self._last: TokenAdapters | None = None

    def __bool__(self) -> bool:
        """Return whether any row has an adapter."""
        return bool(self._of_row)

    def apply(self, plan: SchedulerOutput) -> None:
        """Handle rows that left and rows that start."""
        if self._of_row:
            for row in plan.removed_rows.tolist():
                self._of_row.pop(row, None)
        for row, digest in plan.adapters:
            assert self._adapters is not None, f"row {row} has the adapter {digest}, but enable_lora is off"
            self._of_row[row] = self._adapters.find(digest)

    def of_step(self, inputs: StepInputs) -> TokenAdapters | None:
        """Return the adapters of a step's tokens, or None if no token has one."""
        if inputs.generation == ONCE or inputs.generation != self._generation:
            self._generation, self._last = inputs.generation, self.of_tokens(inputs.rows, inputs.num_tokens)
        return self._last

    def of_tokens(self, rows: Rows, num_tokens: AnyInts) -> TokenAdapters | None:
        """Return the adapters of the tokens of these rows, row after row, or None if no token has one."""
        places: dict[int, int] = {}  # by id() of the packed adapter
        packed: list[Any] = []
        of_row = np.full(len(rows), -1, np.int64)
        for index, row in enumerate(rows.tolist()):
            if (one := self._of_row.get(row)) is None:
                continue
            if id(one) not in places:
                places[id(one)] = len(packed)
                packed.append(one)
            of_row[index] = places[id(one)]
        return TokenAdapters(tuple(packed), of_row.repeat(num_tokens)) if packed else None


def _states(inputs: StepInputs, result: StepResult) -> StepStates | None:
    """Return a step's hidden states; None: this result has none."""
    if not isinstance(result, TappedResult):
        return None
    return StepStates(inputs.rows, inputs.num_tokens, inputs.context_lens, inputs.slots, result.states_of)
