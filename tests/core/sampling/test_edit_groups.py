"""An option more than the engine has is one group in one list: it is asked, told and forgotten like the others."""

import numpy as np
import pytest

from core.execution.plan import NewRow, SchedulerOutput
from core.execution.runner_table import RunnerTable
from core.sampling.columns import SamplingColumns
from core.sampling.edit_group import EditGroup, Forbidden, SampledRows
from core.sampling.logit_edits import edit_groups
from core.sampling.sampler import sample
from ipc.params.sampling_params import SamplingParams

VOCAB_SIZE = 40
NUM_ROWS = 8


class EvenTokens(EditGroup):
    """A test-only option, switched on by skip_special_tokens=False: tokens are even, and none comes twice running."""

    options = ("skip_special_tokens",)

    def __init__(self) -> None:
        self.last: dict[int, int] = {}

    def add(self, new: NewRow) -> bool:
        if not new.params.skip_special_tokens:
            self.last[new.row] = -1
        return new.row in self.last

    def remove(self, row: int) -> None:
        self.last.pop(row, None)

    def append(self, rows: np.ndarray, token_ids: np.ndarray, *, is_distinct: bool = True) -> None:
        pairs = zip(rows.tolist(), token_ids.tolist(), strict=True)
        self.last |= {row: token for row, token in pairs if row in self.last}

    def edit(self, sampled: SampledRows) -> Forbidden | None:
        rows = sampled.samples.rows.tolist()
        pairs = [
            (sample, token)
            for sample, row in enumerate(rows)
            if row in self.last
            for token in {*range(1, VOCAB_SIZE, 2), self.last[row]} - {-1}
        ]
        return Forbidden(*np.array(pairs, np.int64).T) if pairs else None


class Rows:
    """A runner's table and sampling columns, without a model."""

    def __init__(self, *more: EditGroup) -> None:
        self.table = RunnerTable(NUM_ROWS, 16)
        self.columns = SamplingColumns(NUM_ROWS, (*edit_groups(NUM_ROWS, (7,)), *more))

    def start(self, row: int, **options: object) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=None, **options)
        new = NewRow(row, np.array([1], np.int32), 1, 0, np.array([1], np.int32), params, seed=row)
        none = np.zeros(0, np.int32)
        self.table.apply(SchedulerOutput(0, none, [new], none, none, none, none))
        self.columns.add(new)

    def step(self, rows: list[int], logits: np.ndarray) -> list[int]:
        """logits [len(rows), VOCAB_SIZE] -> tokens"""
        index = np.array(rows)
        tokens = sample(logits.copy(), self.columns.inputs(index, self.table))
        self.table.append_tokens(index, tokens)
        self.columns.append_tokens(index, tokens)
        return tokens.tolist()


def descending(num_rows: int) -> np.ndarray:
    """Token 1 is the likeliest, then 2, 3 ..."""
    row = np.concatenate([[-1], -np.arange(VOCAB_SIZE - 1)]).astype(np.float32)
    row[0] = -100
    return np.tile(row, (num_rows, 1))


def test_a_sixth_option_is_applied_beside_the_others() -> None:
    even = EvenTokens()
    rows = Rows(even)
    rows.start(0)
    rows.start(2, skip_special_tokens=False)
    rows.start(5, skip_special_tokens=False, bad_words_token_ids=[[2]])
    batch = [5, 0, 2]
    assert rows.step(batch, descending(3)) == [4, 1, 2]
    assert even.last == {2: 2, 5: 4}
    assert rows.step(batch, descending(3)) == [6, 1, 4]
    assert rows.step([0, 2], descending(2)) == [1, 2]
    rows.columns.remove(2)
    assert even.last == {5: 6}
    assert rows.step([0, 5], descending(2)) == [1, 4]
    rows.columns.remove(5)
    assert not rows.columns.num_edited
    assert (rows.columns.num_drawing, rows.columns.num_edited) == (0, 0)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"logit_bias": {}}, {"bad_words_token_ids": []}, {"allowed_token_ids": None}],
    ids=str,
)
def test_a_row_that_uses_no_option_is_not_edited(options: dict[str, object]) -> None:
    columns = SamplingColumns(NUM_ROWS, edit_groups(NUM_ROWS, (7,)))
    params = SamplingParams(**options)
    columns.add(NewRow(3, np.array([1], np.int32), 1, 0, np.array([1], np.int32), params, seed=0))
    assert not columns.num_edited
    columns.remove(3)
    assert not columns.num_edited


def test_groups_are_asked_only_for_rows_with_an_option() -> None:
    """A row whose options have their defaults costs no call into a group, neither when it starts nor in a step."""

    class Silent(EvenTokens):
        def add(self, new: NewRow) -> bool:
            raise AssertionError("asked")

        append = remove = edit = add  # type: ignore[assignment]

    columns = SamplingColumns(NUM_ROWS, (Silent(),))
    table = RunnerTable(NUM_ROWS, 16)
    columns.add(NewRow(3, np.array([1], np.int32), 1, 0, np.array([1], np.int32), SamplingParams(), seed=0))
    assert columns.inputs(np.array([3]), table).edits == ()
    columns.append_tokens(np.array([3]), np.array([5]))
    columns.remove(3)
