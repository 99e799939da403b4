"""Tokens of unedited logits, where they are allowed, are those of edited logits."""

from typing import Any

import numpy as np
import pytest

from core.execution.plan import NewRow
from core.execution.runner_table import RunnerTable
from core.sampling.columns import SamplingColumns
from core.sampling.edit_group import EditGroup, SampledRows
from core.sampling.first_tokens import sample_rows
from core.sampling.logit_edits import edit_groups
from core.sampling.sampler import sample, sample_greedily
from core.sampling.structured_outputs import Masked
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import NO_INT32S, Bools
from kernels.cpu.build import usable_variants
from kernels.cpu.library import load_cpu_library
from kernels.cpu.sampling import CpuSampler

ROWS, SIZE = 40, 203


@pytest.fixture(scope="module", params=usable_variants())
def sampler(request):
    return CpuSampler(load_cpu_library(request.param))


class Allowing(EditGroup):
    """Allows the tokens of a random mask to all rows with `detokenize` False, and asks first as grammars do.

    closed: rows that have to be masked.
    """

    options = ("detokenize",)
    asks_first = True

    def __init__(self, is_allowed: Bools, closed: tuple[int, ...] = ()) -> None:
        self._is_allowed, self.num_kept, self._closed = is_allowed, 0, closed
        self._rows: set[int] = set()

    def add(self, new: NewRow) -> bool:
        if is_used := not new.params.detokenize:
            self._rows.add(new.row)
        return is_used

    def remove(self, row: int) -> None:
        self._rows.discard(row)

    def take(self, rows: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
        mine = [index for index, row in enumerate(rows) if row in self._rows]
        closed = [index for index in mine if rows[index] in self._closed or tokens[index] < 0]
        asked = sorted({*mine} - {*closed})
        refused = [index for index in asked if not self._is_allowed[rows[index], tokens[index]]]
        self.num_kept += len(asked) - len(refused)
        return refused, closed

    def edit(self, sampled: SampledRows) -> Masked | None:
        rows = sampled.samples.rows
        left = np.array([row in self._rows for row in rows.tolist()])
        if sampled.is_settled is not None:
            left &= ~sampled.is_settled
        bits = np.pad(self._is_allowed[rows[left]], ((0, 0), (0, -SIZE % 32)))
        return Masked(np.flatnonzero(left), np.packbits(bits, axis=1, bitorder="little").view(np.uint32))


def params_of(rng: np.random.Generator) -> SamplingParams:
    """Return parameters of which some leave a draw what it is when other tokens are forbidden, and some do not."""
    options: dict[str, Any] = {"temperature": rng.choice([0.0, 0.4, 1.0, 2.0]), "detokenize": bool(rng.random() < 0.2)}
    some = [{}, {}, {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"logprobs": 1}, {"logit_bias": {7: 3.0}}]
    return SamplingParams(**options, **some[rng.integers(len(some))])


@pytest.mark.parametrize("keeps_logits", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_tokens_are_those_of_edited_logits(seed: int, keeps_logits: bool, sampler: CpuSampler) -> None:
    rng = np.random.default_rng(seed)
    group = Allowing(rng.random((ROWS, SIZE)) < 0.8, closed=(3, 10, 17, 24))
    columns = SamplingColumns(ROWS, (group, *edit_groups(ROWS, (2,))))
    table = RunnerTable(ROWS, 4)
    for row in range(ROWS):
        new = NewRow(row, np.zeros(3, np.int32), 3, 0, NO_INT32S, params_of(rng), seed * ROWS + row)
        columns.add(new)
    rows = np.sort(rng.permutation(ROWS)[:33])
    logits = rng.integers(-9, 9, (len(rows), SIZE)).astype(np.float32)  # ties: the first of equals counts
    logits[3, 5], logits[4, 7], logits[5] = np.nan, np.inf, -np.inf
    expected = sample(logits.copy(), columns.inputs(rows, table), sampler)
    assert group.num_kept == 0
    largest = sample_greedily(logits, sampler)
    got = sample_rows(columns, table, rows, logits.copy(), largest, sampler, keeps_logits=keeps_logits)
    assert np.array_equal(got, expected)
    assert group.num_kept > 2
    for row in range(ROWS):
        columns.remove(row)
    assert not columns.num_asking
    assert (columns.num_drawing, columns.num_edited) == (0, 0)


def test_rows_that_all_have_their_tokens_leave_the_logits_alone(sampler: CpuSampler) -> None:
    columns = SamplingColumns(ROWS, (Allowing(np.ones((ROWS, SIZE), np.bool_)),))
    for row in range(ROWS):
        params = SamplingParams(temperature=row % 2, detokenize=False)
        columns.add(NewRow(row, np.zeros(3, np.int32), 3, 0, NO_INT32S, params, row))
    logits = np.random.default_rng(0).standard_normal((ROWS, SIZE)).astype(np.float32)
    before, rows, table = logits.copy(), np.arange(ROWS), RunnerTable(ROWS, 4)
    expected = sample(logits.copy(), columns.inputs(rows, table), sampler)
    largest = sample_greedily(logits, sampler)
    got = sample_rows(columns, table, rows, logits, largest, sampler, keeps_logits=False)
    assert np.array_equal(got, expected)
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_a_sample_whose_token_is_refused_gets_the_next_one_of_its_draw(share: float, sampler: CpuSampler) -> None:
    """The tokens are asked for in the draw's order, up to three, and edits decide where none of these is allowed."""
    rng = np.random.default_rng(5)
    is_allowed = np.ones((ROWS, SIZE), np.bool_)
    is_allowed[::5] = rng.random((len(is_allowed[::5]), SIZE)) < share
    group, masked = Allowing(is_allowed, closed=(3,)), Allowing(is_allowed)
    masked.asks_first = False  # type: ignore[misc]  # of this one alone
    both = [SamplingColumns(ROWS, (each, *edit_groups(ROWS, (2,)))) for each in (group, masked)]
    for row in range(ROWS):
        for columns in both:
            params = SamplingParams(temperature=row % 2, detokenize=False)
            columns.add(NewRow(row, np.zeros(3, np.int32), 3, 0, NO_INT32S, params, row))
    table, rows, asked = RunnerTable(ROWS, 4), np.arange(ROWS), list[int]()
    take = group.take
    group.take = lambda rows, tokens: asked.extend(rows) or take(rows, tokens)  # type: ignore[method-assign]
    for step in range(20):
        logits = rng.standard_normal((ROWS, SIZE)).astype(np.float32)
        largest = sample_greedily(logits, sampler)
        got, expected = [
            sample_rows(columns, table, rows, logits.copy(), largest, sampler, keeps_logits=step % 4 == 3)
            for columns in both
        ]
        assert np.array_equal(got, expected)
    counts = np.bincount(asked)[::5]
    assert counts.max() <= 20 * 3
    assert counts.sum() > 20 * len(counts) * 1.2
