"""The step before the first one: 16 tokens, of a large model one, because the first request may wait for it."""

from pathlib import Path

import pytest

from core.execution.executor import WARM_UP_TOKENS
from core.executors import local
from core.executors.local import LocalExecutor
from core.runner.step_inputs import StepInputs
from tests.resolved import resolved_config
from tools.lab.bench.tiny_model import write_tiny_model


@pytest.mark.parametrize("is_large", [False, True])
def test_a_large_model_warms_up_with_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool) -> None:
    write_tiny_model(tmp_path)
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "num_blocks_override": 16, "block_size": 8}
    config = resolved_config(executor="local", model=str(tmp_path), dtype="float32", **sizes)
    executor = LocalExecutor(config)
    executor.initialize_cache(config)
    counts, forward = list[int](), executor.runner.forward

    def counted(inputs: StepInputs) -> object:
        counts.append(len(inputs.token_ids))
        return forward(inputs)

    monkeypatch.setattr(executor.runner, "forward", counted)
    monkeypatch.setattr(local, "_MOST_WARM_WEIGHTS", 0 if is_large else 1 << 30)
    took_ns = executor.warm_up()
    assert counts == [1 if is_large else WARM_UP_TOKENS]
    assert took_ns > 0
    assert took_ns % (WARM_UP_TOKENS if is_large else 1) == 0
