"""BatchTable and RunnerTable: a row's entries go to the columns of their names."""

import numpy as np

from core.batch.block_table import BlockTable
from core.batch.request import Request
from core.batch.table import BatchTable, RequestStart
from core.execution.plan import NewRow, SchedulerOutput
from core.execution.runner_table import RunnerBlocks, RunnerTable
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import NO_INT32S

PARAMS = SamplingParams(min_tokens=6, ignore_eos=True, stop_token_ids=[3], max_tokens=20)


def start(first: int) -> RequestStart:
    """A start in which every number that goes into a column is another one."""
    request = Request(
        serial=first,
        client=first + 1,
        number=first + 2,
        token_ids=np.arange(first + 3, dtype=np.int32),
        num_prompt_tokens=first + 4,
        max_total_tokens=first + 5,
        max_computed_tokens=first + 6,
        params=PARAMS,
        seed=0,
        priority=0,
        root=0,
        party=first + 16,
        choice=first + 7,
        rank=first + 8,
        level=first + 9,
        num_computed_before=first + 11,
    )
    return RequestStart(
        request=request,
        hits=NO_INT32S,
        num_hits=0,
        content=first + 12,
        num_computed_tokens=first + 13,
        num_missing_tokens=0,
        num_tokens=0,
        num_blocks=0,
        is_reserved=False,
        num_given=first + 14,
        block_ids=np.arange(first + 14, dtype=np.int32),
        num_named_blocks=first + 15,
    )


def test_each_entry_of_a_start_is_in_the_column_of_its_name() -> None:
    table, names = BatchTable(4), [*BlockTable.__annotations__, *BatchTable.__annotations__]
    table.add([start(500)])
    rows = table.add([start(100), start(300)])
    for row, first, tenancy in zip(rows.tolist(), (100, 300), (1, 2), strict=True):
        assert {name: int(getattr(table, name)[row]) for name in names} == {
            "tenancy": tenancy,
            "client": first + 1,
            "party": first + 16,
            "number": first + 2,
            "choice": first + 7,
            "num_tokens": first + 3,
            "num_placeholders": 0,
            "num_prompt_tokens": first + 4,
            "num_computed_tokens": first + 13,
            "num_computed_before": first + 11,
            "max_total_tokens": first + 5,
            "max_computed_tokens": first + 6,
            "min_total_tokens": first + 4 + 6,
            "num_blocks": first + 14,
            "num_named_blocks": first + 15,
            "content": first + 12,
            "rank": first + 8,
            "serial": first,
            "level": first + 9,
            "ignore_eos": 1,
            "has_stop_ids": 1,
            "num_in_draft": 0,
            "num_drafted": 0,
            "num_accepted": 0,
            "num_released": 0,
            "keeps_blocks": 0,
        }
        assert len(table.token_ids(row)) == first + 3
        assert len(table.block_ids(row)) == first + 14


def test_each_entry_of_a_new_row_is_in_the_column_of_its_name() -> None:
    table, names = RunnerTable(4, 16), [*RunnerBlocks.__annotations__, *RunnerTable.__annotations__]
    tokens, blocks = np.arange(30, dtype=np.int32), np.arange(2, dtype=np.int32)
    new = NewRow(2, tokens, num_prompt_tokens=20, num_computed_tokens=10, block_ids=blocks, params=PARAMS, seed=0)
    none = NO_INT32S
    table.apply(SchedulerOutput(0, none, [new], none, none, none, none))
    assert {name: int(getattr(table, name)[2]) for name in names} == {
        "num_tokens": 30,
        "num_prompt_tokens": 20,
        "num_computed_tokens": 10,
        "pools": 0,
        "num_blocks": 2,
    }
