"""A step's inputs that were moved on from those of the step before are those that are made from nothing."""

import numpy as np
import pytest

from core.execution.plan import NewRow, RowBlocks, SchedulerOutput
from core.execution.runner_table import RunnerTable
from core.models.step import ONCE
from core.runner.step_inputs import InputMaker, StepInputs
from ipc.params.sampling_params import SamplingParams
from ipc.tables.rounding import ceil_div
from tests.core.test_step_cost import count_calls

NUM_ROWS, BLOCK_SIZE = 300, 4  # the latter where a test says nothing else


class Runner:
    """A table and a maker; fresh: one that has made nothing before, for each step."""

    def __init__(self, *, fresh: bool, block_size: int = BLOCK_SIZE) -> None:
        self.table, self._fresh, self._block_size = RunnerTable(NUM_ROWS, block_size), fresh, block_size
        self.maker = InputMaker(self.table, block_size)

    def step(self, plan: SchedulerOutput, failed: bool = False) -> StepInputs:
        """Tokens are made up of the step and the row; failed: the first row's logits are not finite."""
        self.table.apply(plan)
        if self._fresh:
            self.maker = InputMaker(self.table, self._block_size)
        inputs = self.maker(plan)
        rows = plan.rows[inputs.samples]
        tokens = (plan.step * 1000 + rows).astype(np.int32)
        if len(rows) == len(plan.rows) and not failed:
            self.maker.append(rows, tokens)
        else:
            self.table.append_tokens(rows[failed:], tokens[failed:])
        return inputs


class Plans:
    """What a scheduler would plan: each row gets all that is left of its tokens, and the blocks it needs."""

    def __init__(self, block_size: int = BLOCK_SIZE, num_others: int = 0) -> None:
        self._block_size, self._num_others = block_size, num_others
        self._step = self._num_blocks_given = 0
        self.lengths: dict[int, list[int]] = {}  # row: known tokens, computed tokens, blocks

    def plan(
        self, add: dict[int, int] | None = None, remove: tuple[int, ...] = (), most: int = 10**6
    ) -> SchedulerOutput:
        """add: prompt lengths of new rows; most: tokens of a row in this step."""
        self._step += 1
        for row in remove:
            del self.lengths[row]
        added = []
        for row, length in (add or {}).items():
            self.lengths[row] = [length, 0, 1]
            ids = np.arange(length, dtype=np.int32) + 10 * row
            added.append(NewRow(row, ids, length, 0, self._blocks(1), SamplingParams(), 0))
        counts, block_rows = [], []
        for row, state in self.lengths.items():
            counts.append(min(most, state[0] - state[1]))
            state[1] += counts[-1]
            needed = ceil_div(state[1], self._block_size) - state[2]
            block_rows += [row] * needed
            state[2] += needed
            state[0] += state[1] == state[0]
        growing = np.array(sorted([*(new.row for new in added), *block_rows]), np.int32)
        return SchedulerOutput(
            self._step,
            np.array(remove, np.int32),
            added,
            np.array(block_rows, np.int32),
            self._blocks(len(block_rows)),
            np.array(list(self.lengths), np.int32),
            np.array(counts, np.int32),
            others=[RowBlocks(growing, self._blocks(len(growing))) for _ in range(self._num_others)],
        )

    def _blocks(self, count: int) -> np.ndarray:
        self._num_blocks_given += count
        return np.arange(self._num_blocks_given - count, self._num_blocks_given, dtype=np.int32) + 1


def assert_alike(moved: StepInputs, made: StepInputs, block_size: int = BLOCK_SIZE) -> None:
    for name in ("token_ids", "positions", "slots", "logits_rows"):
        assert getattr(moved, name).tolist() == getattr(made, name).tolist(), name
    for name in ("rows", "num_tokens", "context_lens", "samples"):
        assert getattr(moved, name).tolist() == getattr(made, name).tolist(), name
    assert moved.num_samples == made.num_samples
    for row, length in enumerate(made.context_lens.tolist()):
        used = ceil_div(length, block_size)
        assert moved.block_tables[row, :used].tolist() == made.block_tables[row, :used].tolist()
        for one, other in zip(moved.others, made.others, strict=True):
            assert one.block_tables[row, :used].tolist() == other.block_tables[row, :used].tolist()
            assert one.block_tables[row, :used].tolist() != made.block_tables[row, :used].tolist()
    for one, other in zip(moved.others, made.others, strict=True):
        assert one.slots.tolist() == other.slots.tolist()


@pytest.mark.parametrize(("block_size", "num_others"), [(1, 0), (4, 0), (512, 0), (1, 1), (4, 2)])
def test_moved_on_or_made_the_inputs_are_the_same(block_size: int, num_others: int) -> None:
    """A block may have more tokens than a page of the table's; there may be further kinds of layers."""
    plans = Plans(block_size, num_others)
    kept, fresh = Runner(fresh=False, block_size=block_size), Runner(fresh=True, block_size=block_size)
    changes: dict[int, dict] = {
        0: {"add": {5: 7, 2: 1, 9: 30, 7: 200}, "most": 10},  # the last ones in pieces
        1: {"most": 10},
        2: {"most": 10},
        60: {"add": {1: 3}},
        80: {"remove": (2,)},
        81: {"remove": (9,), "add": {9: 2}},  # the row is another request's
        82: {"remove": (9,), "add": {9: 1}},
        95: {"remove": (5, 1)},
    }
    for step in range(140):
        plan = plans.plan(**changes.get(step, {}))
        assert_alike(kept.step(plan), fresh.step(plan), block_size)
    for row, (length, *_) in plans.lengths.items():
        assert kept.table.num_tokens[row] == fresh.table.num_tokens[row] == length
        assert kept.table.tokens.read(row, 0, length).tolist() == fresh.table.tokens.read(row, 0, length).tolist()


def test_a_row_that_got_no_token_is_not_moved_on() -> None:
    plans, kept, fresh = Plans(), Runner(fresh=False), Runner(fresh=True)
    for runner_plan in (plans.plan({0: 3, 1: 3}), plans.plan()):
        assert_alike(kept.step(runner_plan), fresh.step(runner_plan))
    failing = plans.plan()
    assert_alike(kept.step(failing, failed=True), fresh.step(failing, failed=True))
    plans.lengths[1][0] = plans.lengths[1][1] + 1
    after = plans.plan(remove=(0,))
    assert_alike(kept.step(after), fresh.step(after))


def test_a_block_that_the_table_lacks_is_not_entered() -> None:
    plans, runner = Plans(), Runner(fresh=False)
    for _ in range(2):
        runner.step(plans.plan({0: 3} if not plans.lengths else None))
    plan = plans.plan()
    runner.step(SchedulerOutput(plan.step, plan.removed_rows, [], plan.rows, plan.block_ids, plan.rows, plan.rows + 1))
    bare = plans.plan()
    for _ in range(3):
        runner.step(bare)
    with pytest.raises(AssertionError, match="enter blocks"):
        runner.step(bare)


@pytest.mark.parametrize("num_rows", [1, 8, 256])
def test_moving_on_is_a_dozen_calls(num_rows: int) -> None:
    """Calls are those of Python and C functions; operators of arrays are not counted."""
    plans, runner = Plans(), Runner(fresh=False)
    runner.step(plans.plan(dict.fromkeys(range(num_rows), BLOCK_SIZE)))
    runner.step(plans.plan())
    plan = plans.plan()
    runner.table.apply(plan)
    count, _ = count_calls(lambda: runner.maker(plan))
    assert count <= 14


def test_inputs_that_were_moved_on_say_so_by_their_generation() -> None:
    """Advanced inputs keep their arrays; other inputs have a generation of their own."""
    plans, runner, other = Plans(), Runner(fresh=False), Runner(fresh=False)
    first = plans.plan({0: 3, 1: 3})
    made = runner.step(first)
    begun = runner.step(plans.plan())
    moved = runner.step(plans.plan())
    changed = runner.step(plans.plan({2: 5}))
    elsewhere = other.step(first)
    assert moved.generation == begun.generation
    assert all(getattr(moved, name) is getattr(begun, name) for name in begun._fields if name != "generation")
    generations = [inputs.generation for inputs in (made, begun, changed, elsewhere)]
    assert len(set(generations)) == 4
    assert ONCE not in generations
