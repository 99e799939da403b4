"""Memory for the next weights is taken before they come: after an update, or from the start if that was asked for."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.executors.local import LocalExecutor
from core.process.prepare import prepare
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from kernels.memory.weight_memory import WeightMemory
from tests.core.draft_heads import LLAMA, model_shapes, random_weights, write
from tests.resolved import resolved_config

MODEL = {**LLAMA, "num_hidden_layers": 1}
OPTIONS = {"executor": "local", "max_num_seqs": 2, "block_size": 8, "dtype": "float32"}


@pytest.fixture(name="asked")
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes for which memory was asked for ahead. There is always more, but for the thread next to an update."""
    sizes = list[int]()

    def take_ahead(memory: WeightMemory, num_bytes: int) -> bool:
        sizes.append(num_bytes)
        return threading.current_thread() is threading.main_thread()

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
    executor.wake_up()
    assert not executor.take_memory_ahead()
    update(executor, tmp_path, 3)
    assert executor.take_memory_ahead()


def test_an_update_of_an_engine_that_sleeps_takes_no_memory_until_it_wakes_up(tmp_path: Path, asked: list[int]) -> None:
    executor = started(tmp_path)
    executor.sleep(1)
    update(executor, tmp_path, 1)
    assert not executor.take_memory_ahead()
    executor.wake_up()
    assert executor.take_memory_ahead()


def test_memory_for_the_first_update_is_taken_if_that_is_asked_for(tmp_path: Path, asked: list[int]) -> None:
    executor = started(tmp_path, reserve_weights=True)
    assert executor.expects_weights
    assert executor.take_memory_ahead()
    assert asked[0] > 0


def test_an_engine_that_wakes_up_takes_that_memory_again(tmp_path: Path, asked: list[int]) -> None:
    """Only if that was asked for: otherwise its next update is as the first one."""
    executor, other = started(tmp_path, reserve_weights=True), started(tmp_path)
    update(other, tmp_path, 1)
    for one in (executor, other):
        one.sleep(1)
        assert not one.expects_weights
        assert not one.take_memory_ahead()
        one.wake_up()
        assert one.expects_weights is one.take_memory_ahead() is (one is executor)
    executor.sleep(2)
    update(executor, tmp_path, 1)
    assert not executor.take_memory_ahead()
    executor.wake_up()
    assert executor.take_memory_ahead()


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_sleeps_takes_no_memory_for_blocks(level: int, tmp_path: Path) -> None:
    """The loop asks for it whenever it has no work, and it would be as much as sleep() gave back."""
    executor = started(tmp_path)
    while executor.prepare_ahead():
        pass
    executor.sleep(level)
    assert not executor.prepare_ahead()
    if level == 2:
        update(executor, tmp_path, 1)
        assert not executor.prepare_ahead()
    executor.wake_up()
    assert executor.prepare_ahead()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"executor": "fake"}, "executor 'fake' cannot change weights"),
        ({"tensor_parallel_size": 2}, "it has worker processes"),
        ({"device": "cuda"}, "it runs on a GPU"),
        ({"runner": "pooling"}, "it is a pooling model"),
        ({"numerics": "L0"}, "it does not compute with the C kernels"),
        ({"cpu_kernels": "torch"}, "it does not compute with the C kernels"),
    ],
)
def test_memory_for_weights_that_cannot_come_is_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    write(tmp_path, MODEL, random_weights(model_shapes(MODEL), 0))
    config = EngineConfig(model=str(tmp_path), reserve_weights=True, threads=1, **options)
    with pytest.raises(ConfigError, match=f"reserve_weights: .*{text}.*: leave it out"):
        prepare(config, lambda phase: None)
