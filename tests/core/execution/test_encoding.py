"""Plans and outputs as bytes: what comes out is what went in, and what is no plan is refused."""

import numpy as np
import pytest

from core.execution.encoding import decode_output, decode_plan, encode_output
from core.execution.plan import LogprobColumns, ModelRunnerOutput, PooledColumns, encode_plan
from ipc.errors import MalformedMessageError
from tests.core.driving import Driver, add_message, small_config


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_plans_of_a_run_come_out_as_they_went_in() -> None:
    config = small_config(num_blocks=24, max_model_len=80, preemption_mode="swap", num_swap_blocks=40)
    driver = Driver(config)
    structured = {"logit_bias": {5: 1.5}, "logprobs": 2, "stop_token_ids": [9]}
    driver.run(
        *(add_message(10 * n, [n] * 20, 20, temperature=0.5, n=2, seed=2**64 - 1, **structured) for n in range(9))
    )
    for plan in driver.executor.plans:
        assert encode_plan(decode_plan(plan)) == plan
    assert any(len(decode_plan(plan).swapped_in_slots) for plan in driver.executor.plans)


def test_outputs_come_out_as_they_went_in() -> None:
    logprobs = LogprobColumns(ints(0), ints(7), ints(2), ints(1), ints(4, 5), np.array([-0.5, -np.inf], np.float32))
    pooled = PooledColumns(ints(1), ints(1), ints(3), np.array([1, 2, 3e-42], np.float32))
    full = ModelRunnerOutput(
        3, ints(4, -1), logprobs, ints(1, 1), [(1, "why")], ints(1, 0), ints(9), pooled, candidates=logprobs
    )
    for output in (full, ModelRunnerOutput(0, ints())):
        data = encode_output(output)
        again = decode_output(data)
        assert encode_output(again) == data
        assert repr(again) == repr(output)


def test_what_is_none_is_refused() -> None:
    with pytest.raises(MalformedMessageError, match="not the output of a step"):
        decode_output(b"\x91\x01")
    with pytest.raises(MalformedMessageError, match="not a plan"):
        decode_plan(encode_output(ModelRunnerOutput(1, ints())))
    with pytest.raises(MalformedMessageError, match="not a plan"):
        decode_plan(b"")
    with pytest.raises(TypeError, match="must be int32 or float32, not int64"):
        encode_output(ModelRunnerOutput(1, np.zeros(2, np.int64)))  # type: ignore[arg-type]
