"""Memory for the next weights is taken before they come: after an update, or from the start if that was asked for."""

from pathlib import Path

import numpy as np
import pytest

from core.executors.local import LocalExecutor
from kernels.memory.weight_memory import WeightMemory
from tests.core.draft_heads import LLAMA, model_shapes, random_weights, write
from tests.resolved import resolved_config

MODEL = {**LLAMA, "num_hidden_layers": 1}
OPTIONS = {"executor": "local", "max_num_seqs": 2, "block_size": 8, "dtype": "float32"}


@pytest.fixture(name="asked")
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes for which memory was asked for ahead."""
    sizes = list[int]()

    def take_ahead(memory: WeightMemory, num_bytes: int) -> bool:
        sizes.append(num_bytes)
        return True

    monkeypatch.setattr(WeightMemory, "take_ahead", take_ahead)
    return sizes


def started(folder: Path, *, reserve_weights: bool = False) -> LocalExecutor:
    write(folder, MODEL, random_weights(model_shapes(MODEL), 0))
    config = resolved_config(16, 64, model=str(folder), reserve_weights=reserve_weights, **OPTIONS)
    executor = LocalExecutor(config)
    executor.initialize_cache(config)
    return executor


def update(executor: LocalExecutor, folder: Path, version: int) -> None:
    executor.use_weights(executor.prepare_weights(str(folder), version))


def test_an_engine_that_was_updated_takes_memory_for_the_next_weights(tmp_path: Path, asked: list[int]) -> None:
    """Not while new weights wait, which are the second copy; nor if the earlier ones had gone before the update."""
    executor = started(tmp_path)
    assert not executor.expects_weights
    assert not executor.take_memory_ahead()
    mark = executor.prepare_weights(str(tmp_path), 1)
    asked.clear()  # while weights are packed, another thread takes memory for them
    assert not executor.take_memory_ahead()
    executor.use_weights(mark)
    assert executor.take_memory_ahead()
    shapes = [shape for name, shape in model_shapes(MODEL).items() if shape[1:] and "embed_tokens" not in name]
    assert 4 * sum(map(np.prod, shapes)) <= asked.pop() <= 4.4 * sum(map(np.prod, shapes))
    executor.sleep(2)
    assert not executor.take_memory_ahead()
    update(executor, tmp_path, 2)
    assert not executor.take_memory_ahead()
    update(executor, tmp_path, 3)
    assert executor.take_memory_ahead()


def test_memory_for_the_first_update_is_taken_if_that_is_asked_for(tmp_path: Path, asked: list[int]) -> None:
    executor = started(tmp_path, reserve_weights=True)
    assert executor.expects_weights
    assert executor.take_memory_ahead()
    assert asked[0] > 0
