"""The CUDA executor: how it sizes the KV cache, and what it refuses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.execution.executor import StepCosts
from core.executors.cuda import CudaExecutor, most_alone
from core.model_files.loading import load_model
from core.runner.trial_loop import LoopDurations
from ipc.errors import ConfigError, OutOfMemoryError
from ipc.options.config import EngineConfig, KVCacheDtype
from ipc.options.speculation import SpeculativeConfig
from ipc.options.step_sizes import SizedConfig
from kernels.elements import FLOAT32
from kernels.triton import decode_attention
from tests.triton_device import ANYWHERE, ON_GPU
from tools.lab.bench.tiny_model import write_tiny_model

pytestmark = [*ANYWHERE, pytest.mark.skipif(ON_GPU, reason="plays a GPU of its own")]

GIB = 1 << 30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder)
    return folder


@pytest.fixture
def executor(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> CudaExecutor:
    """On a GPU of 10 GiB, of which another process takes 1. The weights take 2, a step with them 3; this is the
    largest one's and the largest decode's, for which together 1 + 1 GiB is kept."""
    made = CudaExecutor(EngineConfig(model=str(tiny), device="cuda", max_num_batched_tokens=40, max_num_seqs=3))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * GIB, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * GIB)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return made


def on_gpu(executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> CudaExecutor:
    monkeypatch.setattr(executor.memory, "_device", torch.device("cuda"))
    monkeypatch.setattr(executor.memory, "device_bytes", 10 * GIB)
    monkeypatch.setattr(executor.memory, "largest_step", lambda: None)
    monkeypatch.setattr(executor.memory, "largest_decode", lambda: None)
    monkeypatch.setattr(executor.memory, "largest_graph", lambda: None)
    return executor


def test_under_the_interpreter_the_cache_shares_the_machines_memory(executor: CudaExecutor) -> None:
    assert executor.cache_memory_bytes() is None
    assert executor.info.dtype == "float32"
    assert executor.info.numerics == "L2"


@pytest.mark.parametrize(("value", "bits"), [("int8", 9), ("fp8", 8)])  # heads of 32 numbers, and a scale of 32 bits
def test_a_cache_in_8_bits_has_more_blocks(value: KVCacheDtype, bits: int, tiny: Path, executor: CudaExecutor) -> None:
    config = EngineConfig(model=str(tiny), device="cuda", kv_cache_dtype=value, dtype="bfloat16")
    coded = CudaExecutor(config)
    assert f" kv={value}" in coded._model.variant
    assert coded.info.fingerprint != executor.info.fingerprint
    count = executor.determine_num_available_blocks(1 << 20, 16)  # in float32
    assert coded.determine_num_available_blocks(1 << 20, 16) == count * 32 // bits


def test_the_largest_step_runs(executor: CudaExecutor) -> None:
    executor.memory.largest_step()
    executor.memory.largest_graph()


def test_steps_of_all_sizes_are_compiled_before_the_first_request(
    executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shape of tiles of a product is a kernel of its own, and compiling one takes seconds."""
    sizes: list[tuple[int, int]] = []
    monkeypatch.setattr(executor.memory, "run_step", lambda *size: sizes.append(size))
    executor.memory.compile_steps()
    assert sizes == [(1, 1), (2, 1), (4, 2), (8, 3), (16, 3), (32, 3), (40, 3)]


def test_the_largest_decode_takes_the_parts_of_the_longest_contexts(
    executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    empty = torch.empty

    def noted(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        sizes.append(tensor.numel())
        return tensor

    monkeypatch.setattr(decode_attention.torch, "empty", noted)
    executor.memory.largest_decode()
    config = executor._model.config
    num_splits = config.max_position_embeddings // 256
    assert max(sizes) == 4 * num_splits * config.num_attention_heads * config.head_dim, "3 requests, padded to 4"


@pytest.mark.parametrize(("num_rows", "num_drafts", "expected"), [(3, None, 3), (3, 7, 24), (200, 7, 328)])
def test_each_draft_has_parts_of_contexts_too(num_rows: int, num_drafts: int | None, expected: int) -> None:
    drafts = None if num_drafts is None else SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts)
    assert most_alone(SizedConfig(max_num_seqs=num_rows, speculative_config=drafts)) == expected


@pytest.mark.parametrize(
    ("overlaps", "loop", "expected"),
    [
        (False, None, StepCosts((10, 12, 18))),
        (True, None, StepCosts((10, 12, 18))),
        (True, LoopDurations(9, 25, 2), StepCosts((9, 9, 15), 0, (23, 25, 31))),
    ],
)
def test_where_steps_overlap_those_alone_take_the_hosts_time_and_the_devices(
    executor: CudaExecutor, overlaps: bool, loop: LoopDurations | None, expected: StepCosts
) -> None:
    overlapping = {(10, 12, 18): (7, 8, 15)}
    measured = SimpleNamespace(
        measure_steps=lambda clock: (10, 12, 18),
        measure_drafts=lambda clock: 0,
        measure_loop=lambda: loop,
        measure_overlapping=overlapping.__getitem__,
    )
    executor.runner, executor._overlaps = measured, overlaps  # type: ignore[assignment]
    assert executor.measure_steps() == expected


def test_what_is_left_is_the_caches(executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = 4 * 3 * (4097 + 257)  # 4096 tokens and one more, in blocks of 16
    assert on_gpu(executor, monkeypatch).cache_memory_bytes() == int(0.9 * 10 * GIB) - 4 * GIB - 1 * GIB - tables


def test_nothing_left_is_an_error_with_the_numbers(executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 9 * GIB)
    with pytest.raises(OutOfMemoryError, match=r"nothing is left .* below gpu_memory_utilization=0.9; raise"):
        on_gpu(executor, monkeypatch).cache_memory_bytes()


def test_a_step_that_does_not_fit_is_an_error(executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    on_gpu(executor, monkeypatch)
    monkeypatch.setattr(executor.memory, "largest_step", fail)
    with pytest.raises(OutOfMemoryError, match=r"=40 tokens or of max_num_seqs=3 requests .* does not fit the GPU"):
        executor.cache_memory_bytes()


def test_models_of_transformers_code_are_refused(tiny: Path) -> None:
    config = EngineConfig(model=str(tiny), device="cuda", model_impl="transformers")
    with pytest.raises(
        ConfigError, match=r"device='cuda' needs a built-in architecture, but .* uses transformers' code"
    ):
        load_model(tiny, FLOAT32, config)
