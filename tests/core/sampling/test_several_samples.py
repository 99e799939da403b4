"""Several samples of a row in one step, behind drafts: each has the bits that it has in a step of its own."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from core.execution.plan import NewRow, SchedulerOutput
from core.execution.runner_table import RunnerTable
from core.sampling.columns import SamplingColumns
from core.sampling.edit_group import Forbidden
from core.sampling.logit_edits import apply_edits, edit_groups
from core.sampling.sampler import NO_EDITS, SamplingInputs, processed_logits, sample
from ipc.params.sampling_params import SamplingParams
from kernels.cpu.library import load_cpu_library
from kernels.cpu.sampling import CpuSampler
from tests.core.sampling.test_logit_edits import EOS, OPTIONS, VOCAB_SIZE, Rows, int32s

FILTERS: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.8, "min_p": 0.02}]


class Drafted(Rows):
    """Rows with drafts behind their tokens; every option, with every filter, beside rows without any."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.params: dict[int, SamplingParams] = {}
        self.known: dict[int, tuple[list[int], list[int]]] = {}  # row -> prompt, output
        self.drafts: dict[int, list[int]] = {}
        for place, options in enumerate(OPTIONS * len(FILTERS)):
            row = len(OPTIONS) * len(FILTERS) - place
            self.params[row] = SamplingParams(max_tokens=None, **{**FILTERS[place // len(OPTIONS)], **options})
            self.known[row] = rng.integers(0, 14, 6).tolist(), rng.integers(0, 14, int(rng.integers(0, 12))).tolist()
            self.drafts[row] = rng.integers(0, 14, int(rng.integers(0, 6))).tolist()
            self.start(row, self.params[row], *self.known[row])
        counts = np.array([len(drafts) for drafts in self.drafts.values()])
        self.batch = np.array(list(self.drafts))
        drafts = int32s(*(token for drafts in self.drafts.values() for token in drafts))
        self.table.write_drafts(self.batch[counts > 0], drafts, counts[counts > 0])
        self.rows = self.batch.repeat(counts + 1)
        self.offsets = np.concatenate([np.arange(count + 1) for count in counts])
        self.logits = rng.normal(0, 2, (len(self.rows), VOCAB_SIZE)).astype(np.float32)
        self.logits[:, :14] += 3  # few tokens, so that they repeat

    def alone(self, row: int, offset: int) -> SamplingInputs:
        """Inputs of the same sample in a step of its own: the drafts before it are tokens of its row."""
        prompt, output = self.known[row]
        single = Rows()
        single.start(row, self.params[row], prompt, [*output, *self.drafts[row][:offset]])
        return single.columns.inputs(np.array([row]), single.table)


@pytest.fixture(params=[False, True], ids=["numpy", "c"])
def kernel(request: pytest.FixtureRequest) -> CpuSampler | None:
    return CpuSampler(load_cpu_library()) if request.param else None


@pytest.mark.parametrize("seed", range(4))
def test_logits_and_tokens_are_those_of_single_steps(seed: int, kernel: CpuSampler | None) -> None:
    drafted = Drafted(seed)
    inputs = drafted.columns.inputs(drafted.rows, drafted.table, drafted.offsets)
    together = drafted.logits.copy()
    apply_edits(together, inputs.edits)
    tokens = sample(drafted.logits.copy(), inputs, kernel)
    processed = processed_logits(together.copy(), np.arange(len(drafted.rows)), inputs)
    num_forbidden = 0
    for place, (row, offset) in enumerate(zip(drafted.rows.tolist(), drafted.offsets.tolist(), strict=True)):
        one, alone = drafted.alone(row, offset), drafted.logits[place : place + 1].copy()
        assert tokens[place] == sample(alone.copy(), one, kernel)[0], (row, offset)
        apply_edits(alone, one.edits)
        assert np.array_equal(together[place], alone[0]), (row, offset)
        assert np.array_equal(processed[place], processed_logits(alone, np.zeros(1, np.int64), one)[0])
        num_forbidden += sum(len(edit.row) for edit in one.edits if isinstance(edit, Forbidden))
    assert len(tokens) > 100
    assert num_forbidden > 30


def test_accepted_tokens_are_counted_as_those_of_single_steps() -> None:
    """The last row's tokens are not all new, and a token is twice among them."""
    drafted, single = Drafted(7), Drafted(7)
    counts = np.array([1 + place % 4 for place in range(len(drafted.batch))])
    tokens = np.random.default_rng(0).integers(0, 5, int(counts.sum())).astype(np.int32)
    drafted.table.append_tokens(drafted.batch, tokens, counts)
    drafted.columns.append_tokens(drafted.batch, tokens, counts)
    for row, token in zip(drafted.batch.repeat(counts).tolist(), tokens.tolist(), strict=True):
        single.table.append_tokens(np.array([row]), int32s(token))
        single.columns.append_tokens(np.array([row]), int32s(token))
    for row in drafted.batch.tolist():
        ends = drafted.table.num_tokens[row], single.table.num_tokens[row]
        assert ends[0] == ends[1]
        assert drafted.table.tokens.read(row, 0, ends[0]).tolist() == single.table.tokens.read(row, 0, ends[1]).tolist()
    inputs, expected = (rows.columns.inputs(rows.batch, rows.table) for rows in (drafted, single))
    for got, wanted in zip((*inputs[:-1], *inputs.edits), (*expected[:-1], *expected.edits), strict=True):
        assert np.array_equal(got, wanted)


def test_rows_without_options_have_no_edits() -> None:
    """And their samples differ in their positions only."""
    table, columns = RunnerTable(4, 16), SamplingColumns(4, edit_groups(4, (EOS,)))
    new = NewRow(2, int32s(1, 2, 3), 2, 0, int32s(1), SamplingParams(), seed=5)
    none: npt.NDArray[np.int32] = int32s()
    table.apply(SchedulerOutput(0, none, [new], none, none, none, none))
    columns.add(new)
    table.write_drafts(np.array([2]), int32s(8, 9), np.array([2]))
    inputs = columns.inputs(np.array([2, 2, 2]), table, np.arange(3))
    assert inputs.position.tolist() == [1, 2, 3]
    assert inputs.seed.tolist() == [5, 5, 5]
    assert inputs.edits is NO_EDITS
    assert table.num_tokens[2] == 3
