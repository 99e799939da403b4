"""DeviceTables hold what the runner's table holds, plan after plan, and what the device appends itself."""

from types import SimpleNamespace

import numpy as np
import torch

from core.execution.plan import NewRow, SchedulerOutput
from core.execution.runner_table import RunnerTable
from core.runner.device_tables import DeviceTables
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import Int32s


def int32s(*values: int) -> Int32s:
    return np.array(values, np.int32)


def new_row(row: int, tokens: list[int], blocks: list[int]) -> NewRow:
    return NewRow(row, int32s(*tokens), len(tokens), 0, int32s(*blocks), SamplingParams(), 0)


def plan(added: list[NewRow], more_blocks: list[tuple[int, int]], removed: Int32s) -> SchedulerOutput:
    rows, blocks = (int32s(*(pair[part] for pair in more_blocks)) for part in (0, 1))
    return SchedulerOutput(0, removed, added, rows, blocks, int32s(), int32s())


def test_tables_follow_the_plans() -> None:
    cache = SimpleNamespace(layers=[torch.zeros(1)], block_size=4)
    table, tables = RunnerTable(3, 4), DeviceTables(3, 40, cache)  # type: ignore[arg-type]
    assert tables.tokens.shape == (3, 41)
    assert tables.blocks.shape == (3, 11)
    plans = [
        plan([new_row(2, [5, 6, 7], [9]), new_row(0, [8], [4])], [], int32s()),
        plan([], [(2, 1), (2, 3), (0, 7)], int32s()),
        plan([new_row(2, [1, 2], [6, 5])], [(0, 8), (0, 2), (0, 11)], int32s(2)),
    ]
    for each in plans:
        table.apply(each)
        tables.apply(each, table)
        for row in (0, 2):
            num_tokens, num_blocks = int(table.num_tokens[row]), int(table.num_blocks[row])
            assert tables.tokens[row, :num_tokens].tolist() == table.tokens.read(row, 0, num_tokens).tolist()
            assert tables.blocks[row, :num_blocks].tolist() == table.blocks.read(row, 0, num_blocks).tolist()
    assert tables.blocks[0, :5].tolist() == [4, 7, 8, 2, 11]


def test_sampled_tokens_are_appended_and_failures_are_zeros() -> None:
    cache = SimpleNamespace(layers=[torch.zeros(1)], block_size=4)
    tables = DeviceTables(3, 8, cache)  # type: ignore[arg-type]
    rows, positions, tokens = (torch.from_numpy(int32s(*values)) for values in ((2, 0), (5, 1), (7, -1)))
    tables.append(rows, positions, tokens)
    assert tables.tokens[2].tolist() == [0, 0, 0, 0, 0, 7, 0, 0, 0]
    assert int(tables.tokens.sum()) == 7
