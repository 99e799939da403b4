"""Pooling on a GPU: the vectors of the C kernels, and bits that neither chunks nor other prompts change."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.engine import EngineCore
from core.executors.cuda import CudaExecutor
from core.executors.local import LocalExecutor
from core.process.resolve import resolve
from frontend.client.journal import vectors_of
from ipc.options.config import EngineConfig
from ipc.params.pooling_params import PoolingParams
from ipc.tables.arrays import Floats
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import Outputs
from ipc.wire.pooling_messages import AddPooling
from tests.triton_device import ANYWHERE
from tools.lab.bench.tiny_model import write_tiny_model

pytestmark = ANYWHERE

PROMPTS = [list(range(3, 26)), list(range(50, 54)), list(range(9, 20))]
TASKS = ["embed", "token_embed", "embed"]
MEAN = (
    '[{"path": "", "type": "sentence_transformers.models.Transformer"},'
    ' {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]'
)


@pytest.fixture(scope="module", name="folder")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("pooling") / "tiny"
    write_tiny_model(folder)
    return folder


def vectors(
    executor: CudaExecutor | LocalExecutor, config: EngineConfig, which: list[int], adapter: AdapterId | None = None
) -> dict[int, Floats]:
    """Those of some of the prompts, by number. adapter: of the first of these."""
    resolved = resolve(config, executor.info, lambda *_: 40, total_memory_bytes=1 << 34, num_cpus=1)
    executor.initialize_cache(resolved)
    engine, found = EngineCore(resolved, executor), dict[int, Floats]()
    inbox: list[Any] = [
        (0, AddPooling(number, prompt, PoolingParams(task=TASKS[number]), adapter=adapter if not place else None))
        for place, number in enumerate(which)
        for prompt in [np.array(PROMPTS[number], "<i4").tobytes()]
    ]
    while inbox or engine.has_work:
        for _, message in engine.step(inbox, 0):
            assert isinstance(message, Outputs), message
            if message.pooled is not None:
                found.update(vectors_of(message.pooled))
        inbox = []
    return found


@pytest.mark.parametrize("method", ["last", "mean"])
def test_vectors_in_chunks_and_whole(folder: Path, tmp_path: Path, method: str) -> None:
    write_tiny_model(tmp_path)
    if method == "mean":
        (tmp_path / "modules.json").write_text(MEAN)
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    shape: dict[str, Any] = {"model": str(tmp_path), "runner": "pooling", "dtype": "float32", "max_model_len": 32}
    shape |= {"max_num_seqs": 3, "threads": 1}
    config = EngineConfig(device="cuda", async_scheduling=True, max_num_batched_tokens=10, **shape)
    executor = CudaExecutor(config)
    expected_tasks = {"embed", "token_embed"}
    assert set(executor.info.tasks) == expected_tasks
    chunked = vectors(executor, config, [0, 1, 2])
    whole = EngineConfig(device="cuda", max_num_batched_tokens=64, **shape)
    for number in range(3):
        (alone,) = vectors(executor, whole, [number]).values()
        assert np.array_equal(alone, chunked[number])
    cpu = EngineConfig(**shape)
    by_cpu = vectors(LocalExecutor(cpu), cpu, [0, 1, 2])
    assert [by_cpu[number].shape for number in range(3)] == [(1, 64), (4, 64), (1, 64)]
    for number, expected in by_cpu.items():
        np.testing.assert_allclose(chunked[number], expected, rtol=0, atol=1e-5)
