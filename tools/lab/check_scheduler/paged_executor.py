"""PagedExecutor: keeps what a KV cache would hold, and reads every context back through the block tables.

It finds a block that is given away too early, shared wrongly or named wrongly at once. The plain fake executor never
looks at blocks.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from core.execution.plan import (
    FAILED_TOKEN,
    NO_TOKEN,
    LogprobColumns,
    ModelRunnerOutput,
    SchedulerOutput,
    concat_logprobs,
    encode_plan,
)
from core.execution.runner_table import RunnerTable
from core.executors.fake import FakeExecutor, checksum, choice_seed, fake_candidates, mix, next_token
from ipc.options.config import EngineConfig
from ipc.params.beam_search import num_candidates
from ipc.tables.arrays import Int32s, UInt64s

MARK = np.uint64(1 << 63)
_ONE, _GOLDEN = np.uint64(1), np.uint64(0x9E3779B97F4A7C15)


class PagedExecutor:
    """Fake tokens computed from what the blocks hold. poison: a request with this id among its tokens fails.

    Errors: AssertionError for a block with foreign content, one that is reused too early, or two copies to one block.
    plans: all encoded plans so far. in_flight: (step, the blocks that it touches) of each step without a result.

    Each slot holds the checksum of the whole prefix up to its token; -1 marks what no step has written. With kv_window
    a token reads back only what it sees. With kv_page_blocks it is read from all blocks of the windows' pages, too, and
    the whole context from the others.
    """

    def __init__(self, config: EngineConfig, poison: int | None = None) -> None:
        assert config.num_blocks_override is not None, "the config is resolved"
        assert config.max_num_seqs is not None, "the config is resolved"
        self._config = config
        self.info = FakeExecutor(config).info
        self.plans: list[bytes] = []
        self.in_flight: list[tuple[int, set[int]]] = []
        self._poison = poison
        self._block_size = config.block_size
        self._pages = config.kv_page_blocks or 0
        num_blocks = config.num_blocks_override * max(1, self._pages)
        self._window = config.kv_window or num_blocks * config.block_size
        self.kv = np.zeros(num_blocks * config.block_size, np.uint64)
        self.host = np.zeros((config.num_host_slots, config.block_size), np.uint64)
        self.table = RunnerTable(config.max_num_seqs, config.block_size)
        self.seed = np.zeros(config.max_num_seqs, np.uint64)
        self.num_candidates = np.zeros(config.max_num_seqs, np.int64)  # of rows of beam searches

    def forget(self) -> None:
        """Lose rows, blocks and steps in flight, as if its processes had been started again."""
        plans = self.plans
        PagedExecutor.__init__(self, self._config, self._poison)
        self.plans = plans

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """Raise AssertionError: the config is resolved."""
        raise AssertionError("the config is resolved")

    def initialize_cache(self, config: EngineConfig) -> None:
        """Raise AssertionError: the config is resolved."""
        raise AssertionError("the config is resolved")

    def prepare_ahead(self) -> bool:
        """Raise AssertionError: this engine is never idle."""
        raise AssertionError("this engine is never idle")

    def close(self) -> None:
        """Do nothing: it holds only memory."""

    def execute(self, plan: SchedulerOutput) -> "_Handle":
        """Run the plan, and read back the context of each row that samples."""
        assert not plan.is_empty
        self.plans.append(encode_plan(plan))
        self._check_new_blocks(plan)
        table = self.table
        table.apply(plan)
        for new in plan.added:
            self.num_candidates[new.row] = num_candidates(new.params, 1) if new.params.use_beam_search else 0
            self.seed[new.row] = choice_seed(new.seed, new.choice) if new.params.temperature > 0 else 0
        self._copy_blocks(plan)
        common = {tuple(self._blocks(row)[: plan.num_common_prefix_blocks]) for row in plan.rows.tolist()}
        assert len(common) == 1, f"plan {plan.step} says that rows have the same blocks, but they have {common}"
        starts = table.num_computed_tokens[plan.rows]
        samples = table.advance(plan)
        rows = plan.rows.tolist()
        if len(plan.num_draft_tokens):
            table.write_drafts(plan.rows, plan.draft_token_ids, plan.num_draft_tokens.astype(np.int64))
        counts = plan.num_scheduled_tokens.tolist()
        for row, start, count in zip(
            rows, starts.tolist(), counts, strict=True
        ):  # all is stored before anything is read
            end = start + count
            self.kv[self._slots(row, start, end)] = sums = self._prefix_sums(row, end)[start:]
            for which in range(self._pages):
                self.kv[self._window_slots(row, start, end, which)] = sums ^ MARK
        touched = {block for row in rows for block in self._blocks(row)}
        touched |= {
            one for row, start in zip(rows, starts.tolist(), strict=True) for one in self._seen_blocks(row, start)
        }
        self.in_flight.append((plan.step, touched))
        return _Handle(self, self.sample(plan, samples))

    def sample(self, plan: SchedulerOutput, samples: npt.NDArray[np.bool_]) -> ModelRunnerOutput:
        """Return the step's result, whose tokens are in the table from then on."""
        if len(plan.num_draft_tokens):
            return self._verified(plan, samples)
        candidates = self._candidates(plan, samples)
        searching = samples & (self.num_candidates[plan.rows] > 0)
        if candidates is not None:
            searching[candidates.rows] = False  # those that are left have failed
        samples = samples & (self.num_candidates[plan.rows] == 0)
        pairs = zip(plan.rows.tolist(), samples, strict=True)
        token_ids = np.array([self.token(row) if sampled else NO_TOKEN for row, sampled in pairs], np.int32)
        token_ids[searching] = FAILED_TOKEN
        # A failed row gets an id too: the next step may be planned already.
        self.table.append_tokens(plan.rows[samples], np.maximum(token_ids[samples], 0))
        return ModelRunnerOutput(plan.step, token_ids, candidates=candidates)

    def _candidates(self, plan: SchedulerOutput, samples: npt.NDArray[np.bool_]) -> LogprobColumns | None:
        parts = []
        for index in np.flatnonzero(samples & (self.num_candidates[plan.rows] > 0)).tolist():
            row = int(plan.rows[index])
            if self.token(row) == FAILED_TOKEN:  # it reads the context back
                continue
            end, count = int(self.table.num_tokens[row]), int(self.num_candidates[row])
            sums, position = np.array([checksum(self.table.tokens.read(row, 0, end))]), np.array([end], np.uint64)
            ids, values = fake_candidates(sums, position, count, self.info.vocab_size)
            rows, positions, counts, ranks = np.array([index, end, len(ids[0]), 1], np.int32)[:, None]
            parts.append(LogprobColumns(rows, positions, counts, ranks, ids[0], values[0]))
        return concat_logprobs(parts)

    def _verified(self, plan: SchedulerOutput, samples: npt.NDArray[np.bool_]) -> ModelRunnerOutput:
        """Return a token after the known ones of each row, and after each draft that is right."""
        runs = [
            self._run_of_drafts(row, count) if sampled else []
            for row, count, sampled in zip(plan.rows.tolist(), plan.num_draft_tokens.tolist(), samples, strict=True)
        ]
        token_ids = np.array([token for run in runs for token in run], np.int32)
        counts = np.array([len(run) for run in runs], np.int32)
        going = counts > 0
        self.table.append_tokens(plan.rows[going], np.maximum(token_ids, 0), counts[going].astype(np.int64))
        self.table.accept(plan, counts)
        return ModelRunnerOutput(plan.step, token_ids, counts=counts)

    def _run_of_drafts(self, row: int, count: int) -> list[int]:
        known, run = int(self.table.num_computed_tokens[row]), list[int]()
        drafts = self.table.tokens.read(row, known, known + count).tolist()
        while len(run) <= count:
            token = self.token(row, known + len(run))
            if token == FAILED_TOKEN and run:
                break  # behind a draft: the next step finds it again
            run.append(token)
            if run != drafts[: len(run)]:
                break
        return run

    def _copy_blocks(self, plan: SchedulerOutput) -> None:
        """Copy out of the cache, within it, then back into it. token() finds what was copied wrongly or too late."""
        blocks = self.kv.reshape(-1, self._block_size)
        for targets in (plan.swapped_out_slots, plan.swapped_in_blocks, plan.copied_to):
            assert len(set(targets.tolist())) == len(targets), f"plan {plan.step} copies twice to one of {targets}"
        self.host[plan.swapped_out_slots] = blocks[plan.swapped_out_blocks]
        blocks[plan.copied_to] = blocks[plan.copied_blocks]
        blocks[plan.swapped_in_blocks] = self.host[plan.swapped_in_slots]

    def _check_new_blocks(self, plan: SchedulerOutput) -> None:
        """Check that no step in flight touches the blocks that this plan begins to fill."""
        fresh = set(plan.block_ids.tolist())
        for other in plan.others:
            fresh |= {block + inside for block in other.ids.tolist() for inside in range(self._pages)}
        for new in plan.added:
            fresh |= set(new.block_ids[new.num_computed_tokens // self._block_size :].tolist())
            for other in plan.others:  # it reads what it has found
                begin = np.flatnonzero(other.rows == new.row)[: new.num_computed_tokens // self._block_size]
                found = other.ids[begin].tolist()
                fresh -= {block + inside for block in found for inside in range(self._pages)}
        for step, blocks in self.in_flight:
            assert not fresh & blocks, f"plan {plan.step} reuses blocks {fresh & blocks} of step {step} in flight"

    def token(self, row: int, end: int | None = None) -> int:
        """Return the row's next token after `end` tokens (None: all computed ones), whose context is read back."""
        end = int(self.table.num_computed_tokens[row]) if end is None else end
        first = max(0, end - self._window)
        begin = 0 if self._pages else first
        sums = self._prefix_sums(row, end)
        found = self.kv[self._slots(row, begin, end)]
        wrong = begin + np.flatnonzero(found != sums[begin:])
        assert not len(wrong), f"row {row}: foreign content at positions {wrong[:8]}"
        for which in range(self._pages):
            seen = self.kv[self._window_slots(row, first, end, which)] ^ MARK
            wrong = first + np.flatnonzero(seen != sums[first:])
            assert not len(wrong), f"row {row}: foreign content in windows at positions {wrong[:8]}"
        if self._poison is not None and self._poison in self.table.tokens.read(row, 0, end):
            return FAILED_TOKEN
        position = np.array([end], np.uint64)
        return int(next_token(found[-1:], position, self.seed[row : row + 1], self.info.vocab_size)[0])

    def _prefix_sums(self, row: int, end: int) -> UInt64s:
        return prefix_sums(self.table.tokens.read(row, 0, end))

    def _blocks(self, row: int) -> list[int]:
        blocks: list[int] = self.table.blocks.read(row, 0, int(self.table.num_blocks[row])).tolist()
        return blocks

    def _seen_blocks(self, row: int, start: int) -> list[int]:
        """Return the blocks of windows that tokens from this place on read and write."""
        first = max(0, start - self._window + 1) // self._block_size if self._pages else 0
        tables = self.table.others
        seen = [
            block for other in tables for block in other.blocks.read(row, first, int(other.num_blocks[row])).tolist()
        ]
        return [block + inside for block in seen for inside in range(self._pages)]

    def _slots(self, row: int, start: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(start, end)
        blocks = self.table.blocks.read(row, 0, int(self.table.num_blocks[row])).astype(np.int64)
        return blocks[positions // self._block_size] * self._block_size + positions % self._block_size

    def _window_slots(self, row: int, start: int, end: int, which: int) -> npt.NDArray[np.int64]:
        positions = np.arange(start, end)
        (other,) = self.table.others
        blocks = other.blocks.get(np.full(end - start, row), positions // self._block_size).astype(np.int64)
        assert blocks.all(), f"row {row} has no block of its window at {positions[blocks == 0]}"
        return (blocks + which) * self._block_size + positions % self._block_size


@cache
def _mixed_positions(count: int) -> UInt64s:
    return mix(np.arange(1, count + 1, dtype=np.uint64))


def prefix_sums(ids: Int32s) -> UInt64s:
    """Return what the slots of these tokens hold, from the first token on."""
    positions = _mixed_positions(1 << len(ids).bit_length())[: len(ids)]  # of few lengths: each step needs them again
    return np.cumsum(mix((ids.astype(np.uint64) + _ONE) * _GOLDEN + positions))


class _Handle:
    def __init__(self, executor: PagedExecutor, output: ModelRunnerOutput) -> None:
        self._executor = executor
        self._output = output

    def result(self) -> ModelRunnerOutput:
        step, _ = self._executor.in_flight.pop(0)
        assert step == self._output.step, f"asked for step {self._output.step} while {step} is the oldest"
        return self._output
