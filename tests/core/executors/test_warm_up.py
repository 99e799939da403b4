"""The step before the first one: 16 tokens, of a large model one in some layers: the first request may wait for it."""

import json
from pathlib import Path

import numpy as np
import pytest

from core.execution.executor import WARM_UP_TOKENS
from core.executors import local
from core.executors.local import LocalExecutor
from core.runner.step_inputs import StepInputs
from ipc.tables.rounding import ceil_div
from tests.resolved import resolved_config
from tools.lab.bench.tiny_model import write_tiny_model

_LAYERS = 40


@pytest.mark.parametrize("is_large", [False, True])
def test_a_large_model_warms_up_with_one_token_in_a_quarter_of_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    write_tiny_model(tmp_path)
    sizes = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": _LAYERS}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    options = {"max_model_len": 64, "max_num_seqs": 4, "num_blocks_override": 16, "block_size": 8}
    config = resolved_config(executor="local", model=str(tmp_path), dtype="float32", load_format="dummy", **options)
    executor = LocalExecutor(config)
    executor.initialize_cache(config)
    counts, forward = list[int](), executor.runner.forward

    def counted(inputs: StepInputs) -> object:
        counts.append(len(inputs.token_ids))
        return forward(inputs)

    monkeypatch.setattr(executor.runner, "forward", counted)
    monkeypatch.setattr(executor.runner, "warm_up", lambda count, run=executor.runner.warm_up: run(count) and 1000)
    monkeypatch.setattr(local, "_MOST_WARM_WEIGHTS", 0 if is_large else 1 << 30)
    took_ns, num_layers = executor.warm_up(), 10 if is_large else _LAYERS
    assert counts == [1 if is_large else WARM_UP_TOKENS]
    assert took_ns == (WARM_UP_TOKENS * ceil_div(1000 * _LAYERS, 9) if is_large else 1000)
    assert _written(executor) == [True] * num_layers + [False] * (_LAYERS - num_layers)
    executor.runner.warm_up(1)  # a step after that has all layers
    assert all(_written(executor))


def _written(executor: LocalExecutor) -> list[bool]:
    """Return for each layer whether anything is in its part of the cache."""
    return [bool(np.any(layer)) for layer in executor.runner.cache.memory]
