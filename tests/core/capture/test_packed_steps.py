"""Packed steps: whatever a plan or a result has beyond plain columns keeps its step from being packed."""

import msgspec
import numpy as np
import pytest

from core.capture.packed_steps import is_plain
from core.execution.plan import ModelRunnerOutput, NewRow, SchedulerOutput, encode_plan
from ipc.params.sampling_params import SamplingParams

ONES = np.ones(1, np.int32)
PLAIN = SchedulerOutput(7, ONES, [], ONES, ONES, ONES, ONES)
RESULT = ModelRunnerOutput(7, ONES)
#: What a packed step has columns for, or a Step does not tell.
PACKED = {"step", "removed_rows", "block_rows", "block_ids", "rows", "num_scheduled_tokens"}
#: What follows from the others, so that no step of a capture has it.
DERIVED = {"num_common_prefix_blocks"}
PACKED_OF_RESULT = {"step", "token_ids"}
NOT_IN_STEPS = {"logprobs", "failures"}
#: Columns that have an entry only where another column has one.
BESIDE = {
    "swapped_out_slots": "swapped_out_blocks",
    "swapped_in_slots": "swapped_in_blocks",
    "draft_token_ids": "num_draft_tokens",
    "copied_to": "copied_blocks",
    "copied_states_to": "copied_states",
    "saved_after": "saved_rows",
    "saved_slots": "saved_rows",
}
BESIDE_OF_RESULT = {"draft_token_ids": "draft_counts"}


def filled(field: msgspec.structs.FieldInfo) -> object:
    """Return a value of the field that is not empty, by what is in it where there is nothing."""
    if field.name == "added":
        return [NewRow(0, ONES, 1, 0, ONES, SamplingParams(), seed=0)]
    return [(1, [])] if field.default_factory is list else ONES


def fields_but(kind: type[msgspec.Struct], known: set[str]) -> list[msgspec.structs.FieldInfo]:
    return [field for field in msgspec.structs.fields(kind) if field.name not in known]


@pytest.mark.parametrize("field", fields_but(SchedulerOutput, PACKED | DERIVED), ids=lambda field: field.name)
def test_a_plan_with_anything_else_is_not_plain(field: msgspec.structs.FieldInfo) -> None:
    """A new field of SchedulerOutput fails here until is_plain() and the digest know it."""
    assert is_plain(PLAIN, RESULT)
    leader = BESIDE.get(field.name, field.name)
    assert leader == field.name or leader not in BESIDE
    fields = {one.name: filled(one) for one in msgspec.structs.fields(SchedulerOutput) if one.name == leader}
    assert fields, f"{field.name} stands beside {leader}, which is no field"
    assert not is_plain(msgspec.structs.replace(PLAIN, **fields), RESULT), leader
    assert encode_plan(msgspec.structs.replace(PLAIN, **fields)) != encode_plan(PLAIN), leader


@pytest.mark.parametrize("field", fields_but(ModelRunnerOutput, PACKED_OF_RESULT | NOT_IN_STEPS), ids=lambda f: f.name)
def test_a_result_with_anything_else_is_not_plain(field: msgspec.structs.FieldInfo) -> None:
    leader = BESIDE_OF_RESULT.get(field.name, field.name)
    assert not is_plain(PLAIN, msgspec.structs.replace(RESULT, **{leader: ONES})), leader


def test_a_result_of_other_numbers_is_not_plain() -> None:
    assert not is_plain(PLAIN, ModelRunnerOutput(7, np.ones(1, np.int64)))  # type: ignore[arg-type]
    assert is_plain(None, RESULT)
    assert is_plain(PLAIN, None)
