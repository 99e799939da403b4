"""The fake executor: each token is a seeded function of all ids before it and its position. It needs no model or torch.

It is part of the product: process-level tests, replay without a model, and simulation run on it. Every token depends on
every id before it, so a token that is lost, duplicated or taken from another request changes all later ones.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from core.adapters.adapter import AdapterWeights
from core.adapters.file_matrix import FileMatrix, FilePart
from core.adapters.store import Adapters
from core.execution.executor import Costs, FinishedStep, ModelInfo, StepCosts, StepHandle
from core.execution.plan import (
    FAILED_TOKEN,
    NO_TOKEN,
    LogprobColumns,
    ModelRunnerOutput,
    NewRow,
    PooledColumns,
    SchedulerOutput,
    concat_logprobs,
)
from core.execution.runner_table import RunnerTable
from core.executors.fake_options import FakeOptions, read_fake_options
from core.grammars.grammars import model_grammars
from core.grammars.matchers import RowMatchers
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.params.beam_search import num_candidates
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import NO_INT32S, AnyInts, Bools, Floats, Int32s, Ints, Positions, Rows, TokenIds, UInt64s

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_WIDTH = 8  # elements of a vector


def mix(value: UInt64s) -> UInt64s:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood, 2014) to each element."""
    value = value ^ (value >> _SHIFTS[0])
    value *= _FACTORS[0]
    value ^= value >> _SHIFTS[1]
    value *= _FACTORS[1]
    value ^= value >> _SHIFTS[2]
    return value


def checksum(token_ids: AnyInts, start: int = 0) -> np.uint64:
    """Return the order-dependent sum of ids at positions start, start + 1, ... Sums of adjacent parts add up."""
    positions = np.arange(start, start + len(token_ids), dtype=np.uint64)
    return np.uint64(np.add.reduce(_terms(token_ids, positions), dtype=np.uint64))


def next_token(checksums: UInt64s, positions: UInt64s, seeds: UInt64s, vocab_size: int) -> Int32s:
    """Return the tokens [n] int32 at `positions` after ids with these checksums. seeds: 0 for greedy rows."""
    return (mix(checksums + positions * _GOLDEN + mix(seeds)) % np.uint64(vocab_size)).astype(np.int32)


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed that fake_tokens needs for one choice of a request."""
    return seed ^ (choice * int(_GOLDEN)) % 2**64


def _terms(token_ids: AnyInts, positions: UInt64s) -> UInt64s:
    return mix((token_ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN + mix(positions + np.uint64(1)))


def fake_logprobs(tokens: TokenIds, positions: Positions, num_top: Ints, rows: Rows, vocab_size: int) -> LogprobColumns:
    """Make logprobs for each token [n] and its position [n].

    The ids are the token itself, with rank 3, then token + 1, token + 2, ...: num_top [n] of them.
    """
    counts = 1 + np.minimum(num_top, vocab_size)
    offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return LogprobColumns(
        rows=rows.astype(np.int32),
        positions=positions.astype(np.int32),
        counts=counts.astype(np.int32),
        ranks=np.full(len(rows), 3, np.int32),
        token_ids=((np.repeat(tokens, counts) + offsets) % vocab_size).astype(np.int32),
        values=(-(np.repeat(positions % 64, counts) + offsets + 1) / 16).astype(np.float32),
    )


def fake_vector(checksum_of_ids: np.uint64) -> Floats:
    """Return the vector [_WIDTH] float32 after ids with this checksum. Its numbers are from -1 to 1."""
    mixed = mix(checksum_of_ids + np.arange(1, _WIDTH + 1, dtype=np.uint64) * _GOLDEN)
    return ((mixed >> np.uint64(40)).astype(np.float32) - 2.0**23) / np.float32(2.0**23)


def fake_candidates(checksums: UInt64s, positions: UInt64s, count: int, vocab_size: int) -> tuple[Int32s, Floats]:
    """Return candidates [n, count] and log probabilities of beam search rows after ids with these checksums.

    The first is the row's next token; the others are the ids after it.
    """
    firsts = next_token(checksums, positions, np.zeros(len(checksums), np.uint64), vocab_size)
    offsets = np.arange(min(count, vocab_size))
    steps = 0.25 + (mix(checksums + positions) % np.uint64(997)).astype(np.float32) / 997
    values = -steps[:, None] * (offsets + 1) / 4
    return ((firsts[:, None] + offsets) % vocab_size).astype(np.int32), values.astype(np.float32)


def adapter_seed(digest: str) -> int:
    """Return what an adapter adds to the checksum of ids. It changes every token."""
    return int(digest[:16], 16)


def adapted_checksum(checksum_of_ids: np.uint64, seed: int) -> np.uint64:
    """Return the checksum of ids with an adapter of this seed."""
    return np.uint64((int(checksum_of_ids) + seed) % 2**64)


class _FakeAdapter(NamedTuple):
    num_bytes: int


class _FakeHost:
    """The AdapterHost for no model: it has one matrix."""

    _NAME = "model.layers.0.self_attn.q_proj"
    shapes: Mapping[str, tuple[int, int]] = {_NAME: (16, 16)}
    peft_layers: Mapping[str, FileMatrix] = {_NAME: FileMatrix((FilePart(_NAME),))}
    gguf_layers: Mapping[str, FileMatrix] = {"blk.0.attn_q": FileMatrix((FilePart(_NAME),))}

    def pack(self, weights: AdapterWeights) -> _FakeAdapter:
        return _FakeAdapter(sum(matrix.a.nbytes + matrix.b.nbytes for matrix in weights.matrices.values()))


class FakeExecutor:
    """An Executor without a model."""

    def __init__(self, config: EngineConfig, options: FakeOptions | None = None) -> None:
        """options: None = those of the config. Errors: ConfigError."""
        self.options = options = options or read_fake_options(config)
        fingerprint = f"fake-1-{options.vocab_size}-{options.eos_token_id}"
        self.info = ModelInfo(
            name=config.model or "fake",
            fingerprint=fingerprint,
            dtype="float32" if config.dtype == "auto" else config.dtype,
            vocab_size=options.vocab_size,
            max_model_len=options.max_model_len,
            eos_token_ids=(options.eos_token_id,),
            numerics="L2",
            tasks={"generate": 0, "embed": _WIDTH, "token_embed": _WIDTH},
            whole_prompt_tasks=("token_embed",),
            weights=fingerprint,
            variant="fake",
        )
        self.grammars = model_grammars(config, self.info.vocab_size, self.info.eos_token_ids)
        self.adapters = Adapters(config, _FakeHost()) if config.enable_lora else None

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """Return the number of blocks in memory_bytes, assuming 4 KiB per token."""
        return max(2, memory_bytes // (block_size * 4096))

    def cache_memory_bytes(self) -> int | None:
        """Return None: there is no device with its own memory."""
        return None

    def initialize_cache(self, config: ResolvedConfig) -> None:
        """Allocate the mirror of the batch table and the columns of checksums and seeds."""
        self._table = RunnerTable(config.max_num_seqs, config.block_size)
        self._checksum = np.zeros(config.max_num_seqs, np.uint64)
        self._seed = np.zeros(config.max_num_seqs, np.uint64)
        self._matchers = RowMatchers(self.grammars, config.max_num_seqs)
        self._num_candidates = np.zeros(config.max_num_seqs, np.int64)  # of beam search rows
        self._num_logprobs = np.full((config.max_num_seqs, 2), -1)  # for output and prompt tokens; -1 = none
        self._most = self.options.tokens_per_step
        self._pooling: dict[int, PoolingParams] = {}  # by row
        self._adapter_seeds: dict[int, int] = {}  # by row

    def measure_costs(self) -> Costs:
        """Return made-up costs: copying a block of 16 tokens is five times as fast as computing it."""
        return Costs(recompute_ns_per_token=10_000, swap_ns_per_block=32_000)

    def measure_steps(self) -> StepCosts:
        """Return made-up durations: a millisecond, and twice as much for each doubling above 16 tokens."""
        return StepCosts(tuple(1_000_000 * max(1, size // 16) for size in (1, 2, 4, 8, 16, 32, 64, 128)))

    def warm_up(self) -> int:
        """Return a made-up duration: a millisecond."""
        return 1_000_000

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run one step. The returned step is finished."""
        table = self._table
        table.apply(plan)
        if len(self._matchers):
            for row in plan.removed_rows.tolist():
                self._matchers.remove(row)
        if plan.adapters or self._adapter_seeds:
            self._adapt(plan)
        for new in plan.added:
            self._pooling.pop(new.row, None)
            self._add_sampling(new, new.params)
        for pooling in plan.added_pooling:
            self._num_logprobs[pooling.row] = -1
            self._num_candidates[pooling.row] = 0
            self._pooling[pooling.row] = pooling.params
        samples = table.advance(plan)
        candidates, searches = self._candidates(plan, samples)
        samples[searches] = False
        rows = plan.rows[samples]
        if len(plan.num_draft_tokens):
            token_ids, counts = self._verify(plan, samples)
        elif self._most > 1:
            token_ids, counts = self._sample_several(plan.rows, samples)
        else:
            token_ids, counts = np.full(len(plan.rows), NO_TOKEN, np.int32), None
            token_ids[samples] = sampled = self._sample(rows)
            table.append_tokens(rows, np.maximum(sampled, 0))
        owners = plan.rows if counts is None else plan.rows.repeat(counts)
        failures = self._failures(plan.rows, owners[token_ids == FAILED_TOKEN]) if len(self._matchers) else []
        logprobs = self._logprobs(plan, samples) if (self._num_logprobs[plan.rows] >= 0).any() else None
        if counts is not None:
            table.accept(plan, counts)
        drafts = self._matchers.drafts(plan.rows) if self._matchers else (None, NO_INT32S)
        return FinishedStep(
            ModelRunnerOutput(
                plan.step,
                token_ids,
                logprobs,
                counts,
                failures,
                *drafts,
                self._pooled(plan) if self._pooling else None,
                candidates,
            )
        )

    def _seeded(self, checksum_of_ids: np.uint64, row: int) -> np.uint64:
        """Return the checksum plus what the row's adapter adds."""
        seed = self._adapter_seeds.get(row)
        return checksum_of_ids if seed is None else adapted_checksum(checksum_of_ids, seed)

    def _adapt(self, plan: SchedulerOutput) -> None:
        for row in plan.removed_rows.tolist():
            self._adapter_seeds.pop(row, None)
        for row, digest in plan.adapters:
            assert self.adapters is not None, f"row {row} has the adapter {digest}, but enable_lora is off"
            self.adapters.find(digest)
            self._adapter_seeds[row] = adapter_seed(digest)

    def _add_sampling(self, new: NewRow, params: SamplingParams) -> None:
        self._checksum[new.row] = self._seeded(checksum(new.token_ids), new.row)
        if params.structured_outputs is not None:
            output, takes_drafts = new.token_ids[new.num_prompt_tokens :], not params.use_beam_search
            self._matchers.add(new.row, params.structured_outputs, output, takes_drafts=takes_drafts)
        self._seed[new.row] = choice_seed(new.seed, new.choice) if params.temperature > 0 else 0
        self._num_candidates[new.row] = num_candidates(params, 1) if params.use_beam_search else 0
        num_logprobs = None if params.use_beam_search else params.logprobs
        of_prompt = params.prompt_logprobs
        wanted = (num_logprobs, None if of_prompt is None or not new.wants_prompt_logprobs else of_prompt)
        if wanted == (None, None):
            self._num_logprobs[new.row] = -1
        else:
            self._num_logprobs[new.row] = [-1 if n is None else self.info.vocab_size if n < 0 else n for n in wanted]

    def _pooled(self, plan: SchedulerOutput) -> PooledColumns | None:
        """Return the vectors of the pooling rows whose last tokens this step computes."""
        table, indices, vectors = self._table, [], []
        for index, row in enumerate(plan.rows.tolist()):
            params = self._pooling.get(row)
            if params is None or table.num_computed_tokens[row] < table.num_tokens[row]:
                continue
            ids = table.tokens.read(row, 0, int(table.num_tokens[row]))
            ends = range(1, len(ids) + 1) if params.task == "token_embed" else (len(ids),)
            indices.append(index)
            sums = [self._seeded(checksum(ids[:end]), row) for end in ends]
            vectors.append(np.stack([fake_vector(one)[: params.dimensions] for one in sums]))
            del self._pooling[row]
        if not indices:
            return None
        counts, widths = np.array([each.shape for each in vectors], np.int32).T
        values = np.concatenate([each.ravel() for each in vectors])
        return PooledColumns(np.array(indices, np.int32), counts, widths, values)

    def _candidates(self, plan: SchedulerOutput, samples: Bools) -> tuple[LogprobColumns | None, list[int]]:
        """Return the candidates of beam search rows whose tokens are all computed, and the indices of these rows.

        None if there are none. A row whose grammar allows no token is left out.
        """
        which = np.flatnonzero(samples & (self._num_candidates[plan.rows] > 0))
        parts, searches = [], list[int]()
        for index, row in zip(which.tolist(), plan.rows[which].tolist(), strict=True):
            found = self._candidates_of(row)
            if found is None:
                continue
            ids, values = found
            ones, lengths = np.ones(1, np.int32), self._table.num_tokens[row : row + 1]
            parts.append(
                LogprobColumns(
                    np.array([index], np.int32), lengths.astype(np.int32), ones * len(ids), ones, ids, values
                )
            )
            searches.append(index)
        return concat_logprobs(parts), searches

    def _candidates_of(self, row: int) -> tuple[Int32s, Floats] | None:
        """Return the ids and log probabilities [k] of a row's candidates, or None if its grammar allows no token."""
        allowed = self._allowed(row)
        if not len(allowed):
            return None
        at, count = slice(row, row + 1), int(self._num_candidates[row])
        positions = self._table.num_tokens[at].astype(np.uint64)
        places, values = fake_candidates(self._checksum[at], positions, count, len(allowed))
        return allowed[places[0]], values[0]

    def _allowed(self, row: int) -> Int32s:
        """Return the ids that the row's grammar allows now; all ids if it has none."""
        everything = np.arange(self.info.vocab_size, dtype=np.int32)
        if not len(self._matchers) or not self._matchers.is_constrained[row]:
            return everything
        bits = np.unpackbits(self._matchers.masks(np.array([row])).view(np.uint8), axis=1, bitorder="little")
        return everything[np.flatnonzero(bits[0, : self.info.vocab_size])]  # there may be more ids than bits

    def _sample(self, rows: Rows) -> Int32s:
        """Return the next token of each row. It is in the checksum but not in the table yet.

        FAILED_TOKEN if a row's grammar allows none.
        """
        positions = self._table.num_tokens[rows].astype(np.uint64)
        sampled = next_token(self._checksum[rows], positions, self._seed[rows], self.info.vocab_size)
        if len(self._matchers):
            self._constrain(rows, positions, sampled)
        known = sampled >= 0
        self._checksum[rows[known]] += _terms(sampled[known], positions[known])
        return sampled

    def _constrain(self, rows: Rows, positions: UInt64s, sampled: Int32s) -> None:
        """Replace the tokens of constrained rows by tokens that their grammars allow, and advance the grammars.

        The same function of all ids chooses among the allowed tokens.
        """
        mine = np.flatnonzero(self._matchers.is_constrained[rows])
        if not len(mine):
            return
        bits = np.unpackbits(self._matchers.masks(rows[mine]).view(np.uint8), axis=1, bitorder="little")
        for index, allowed in zip(mine.tolist(), bits[:, : self.info.vocab_size], strict=True):
            ids, at = np.flatnonzero(allowed), rows[index : index + 1]
            sampled[index] = (
                ids[next_token(self._checksum[at], positions[index : index + 1], self._seed[at], max(1, len(ids)))[0]]
                if len(ids)
                else FAILED_TOKEN
            )
        going = mine[sampled[mine] >= 0]
        self._matchers.append(rows[going], sampled[going])

    def _failures(self, rows: Rows, failed: Rows) -> list[tuple[int, str]]:
        """Return the texts of the failed rows, with their indices in the plan."""
        indices = np.flatnonzero(np.isin(rows, failed)).tolist()
        return [(index, text) for index in indices if (text := self._matchers.failure(int(rows[index]))) is not None]

    def _sample_several(self, rows: Rows, samples: Bools) -> tuple[Int32s, Int32s]:
        """Return (token_ids, counts [R]) of the plan's rows.

        The number of tokens a row yields, 1 to tokens_per_step, is a function of all its tokens. The tokens are the
        same as with one token per step.
        """
        counts = np.zeros(len(rows), np.int32)
        counts[samples] = 1 + mix(self._checksum[rows[samples]]) % np.uint64(self._most)
        token_ids = np.zeros((len(rows), self._most), np.int32)
        for offset in range(self._most):
            going = np.flatnonzero(counts > offset)
            token_ids[going, offset] = sampled = self._sample(rows[going])
            if offset:  # a failure must be alone: the row's next step finds it again
                counts[going[sampled < 0]] = offset
                going, sampled = going[sampled >= 0], sampled[sampled >= 0]
            self._table.append_tokens(rows[going], np.maximum(sampled, 0))
        return token_ids[np.arange(self._most) < counts[:, None]], counts

    def _verify(self, plan: SchedulerOutput, samples: Bools) -> tuple[Int32s, Int32s]:
        """Return (token_ids, counts [R]) of the plan's rows: samples up to the first that differs from a draft."""
        rows, drafts = plan.rows, plan.num_draft_tokens
        firsts = drafts.cumsum() - drafts
        counts, going = np.zeros(len(rows), np.int32), samples.copy()
        sampled = np.full((len(rows), int(drafts.max()) + 1), NO_TOKEN, np.int32)
        while going.any():
            index = np.flatnonzero(going)
            tokens = self._sample(rows[index])
            kept = (tokens >= 0) | (counts[index] == 0)  # a failure after drafts is found again by the next step
            going[index[~kept]] = False
            index, tokens = index[kept], tokens[kept]
            sampled[index, counts[index]] = tokens
            self._table.append_tokens(rows[index], np.maximum(tokens, 0))
            places = np.minimum(firsts[index] + counts[index], len(plan.draft_token_ids) - 1)
            going[index] = (counts[index] < drafts[index]) & (plan.draft_token_ids[places] == tokens)
            counts[index] += 1
        return sampled[np.arange(sampled.shape[1]) < counts[:, None]], counts

    def _logprobs(self, plan: SchedulerOutput, samples: Bools) -> LogprobColumns | None:
        """Return the logprobs of all rows, row by row. The sampled tokens are already in the table."""
        table, parts = self._table, []
        known = plan.num_scheduled_tokens.copy()
        if len(plan.num_draft_tokens):
            known -= plan.num_draft_tokens
        for index, row in enumerate(plan.rows.tolist()):
            end, num_prompt = int(table.num_computed_tokens[row]), int(table.num_prompt_tokens[row])
            positions = np.arange(end - int(known[index]), end) + 1  # positions of the tokens that follow
            output = np.arange(end, int(table.num_tokens[row]) if samples[index] else end)  # what the row has yielded
            for wanted, at in zip(
                self._num_logprobs[row].tolist(), (output, positions[positions < num_prompt]), strict=True
            ):
                if wanted >= 0 and len(at):
                    tokens = table.tokens.get(np.full(len(at), row), at)
                    parts.append(
                        fake_logprobs(
                            tokens, at, np.full(len(at), wanted), np.full(len(at), index), self.info.vocab_size
                        )
                    )
        return concat_logprobs(sorted(parts, key=lambda part: int(part.positions[0])))

    def prepare_ahead(self) -> bool:
        """Return False: there is nothing to prepare."""
        return False

    def close(self) -> None:
        """Do nothing: no resource is held."""


def create(config: EngineConfig) -> FakeExecutor:
    """Create the executor for this config."""
    return FakeExecutor(config)
