"""Groups of workers with a GPU each: answers with every bit of one. Here the kernels run under Triton's interpreter."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.executors.by_name import load_executor
from core.workers import processes
from core.workers.device_part import DevicePartExecutor
from core.workers.wires import Place, Wires
from ipc.errors import ConfigError
from ipc.machine.child_process import run_package
from kernels.cpu.group import make_shared_file
from tests.core.executors.test_cuda_recurrent import KINDS_OF_LAYERS, write
from tests.core.workers.part_answers import MODEL, STATE_SPACE, answers, config_of, kill, requests
from tests.core.workers.test_worker_adapters import LORA, adapted, adapters_of
from tests.placed import PREFIX
from tests.triton_device import ANYWHERE, ON_GPU

pytestmark = ANYWHERE

OPTIONS: dict[str, Any] = {"device": "cuda", "max_model_len": 64, "num_gpu_blocks_override": 7}


@pytest.fixture(scope="module", name="shallow")
def shallow_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter takes its time for each layer."""
    folder = tmp_path_factory.mktemp("shallow")
    (folder / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 1}))
    return str(folder)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers under the interpreter have the products of a tensor core."""

    def run(package: str, *rest: Any) -> Any:
        return run_package(package if ON_GPU else "tests.core.workers.emulated", *rest)

    monkeypatch.setattr(processes, "run_package", run)


def of_ranks(
    folder: str, size: int, disturb: dict[int, Any] | None = None, *, max_tokens: int = 8, **options: Any
) -> list[Any]:
    return answers(config_of(folder, size, **OPTIONS, **options), disturb, sent=requests(4, max_tokens))


@pytest.mark.checkout  # its workers are run from tests/, which no wheel has
def test_every_bit_is_that_of_one_gpu(shallow: str) -> None:
    """Sampled tokens, log probabilities and edits, with blocks in 8 bits that are swapped, and what is measured at the
    start."""
    alone = of_ranks(shallow, 1, kv_cache_dtype="int8")
    assert len(alone[1]) == 5
    assert of_ranks(shallow, 2, kv_cache_dtype="int8") == alone


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_bit_of_state_spaces(tmp_path: Path) -> None:
    """Their heads have one norm in common; states are swapped."""
    layers = {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}
    (tmp_path / "config.json").write_text(json.dumps({**STATE_SPACE, **layers}))
    assert of_ranks(str(tmp_path), 2) == of_ranks(str(tmp_path), 1)


TWO_GROUPS: dict[str, Any] = {"linear_num_key_heads": 2}
DRAFTS: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_bit_of_recurrent_layers_with_adapters_and_drafts(tmp_path: Path) -> None:
    """Among swapped requests."""
    folder = write(tmp_path, {**KINDS_OF_LAYERS["gated delta"], **TWO_GROUPS, "vocab_size": 500})
    weights = adapters_of(folder)
    drafts = {**DRAFTS["speculative_config"], "step_ns": [10**6] * 8}
    options = {**OPTIONS, **LORA, "speculative_config": drafts, "async_scheduling": False}
    options["num_gpu_blocks_override"] = 8

    def run(size: int) -> list[Any]:
        config = config_of(folder, size, **options)
        return answers(config, sent=adapted(weights, requests(4, 24)), adapters=weights)

    assert run(2) == run(1)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [{}, DRAFTS, {"kv_cache_dtype": "fp8"}])
@pytest.mark.parametrize("size", [2, 3])
def test_every_bit_at_any_size_and_whichever_rank_dies(folder: str, size: int, options: dict[str, Any]) -> None:
    alone = of_ranks(folder, 1, max_tokens=24, **options)
    assert of_ranks(folder, size, {9: kill(size - 1)}, max_tokens=24, **options) == alone


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"numerics": "L0"}, "numerics='L0'"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size > 1"),
        ({"nnodes": 2, "master_addr": "x"}, "nnodes > 1"),
    ],
)
def test_what_several_gpus_lack_is_refused_by_name(folder: str, options: dict[str, Any], refused: str) -> None:
    with pytest.raises(ConfigError, match=f"device='cuda' with several workers does not support {refused}"):
        load_executor(config_of(folder, 2, **OPTIONS, **options))


def test_no_more_ranks_than_query_heads(folder: str) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=5 is more than the 4 query heads"):
        load_executor(config_of(folder, 5, **OPTIONS))


def test_more_ranks_than_gpus_are_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(f"{PREFIX}core.workers.device_part.cuda_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    memory = make_shared_file()
    try:
        with pytest.raises(ConfigError, match="tensor_parallel_size=2 is more than the 1 GPUs of this machine"):
            DevicePartExecutor(config_of(folder, 1, **OPTIONS), Place(0, 2), Wires(memory))
    finally:
        os.close(memory)


@pytest.mark.parametrize(("device", "expected"), [("cuda", 9), ("cpu", 4)])
def test_each_gpu_has_memory_of_its_own(folder: str, device: str, expected: int) -> None:
    """Workers on CPUs of one machine share its memory."""
    from core.workers.executor import WorkersExecutor
    from core.workers.messages import Number
    from core.workers.wires import places_of

    class Crew:
        def ask(self, *_: Any) -> Sequence[Number]:
            return [Number(9), Number(9)]

    executor = WorkersExecutor.__new__(WorkersExecutor)
    executor._config = msgspec.structs.replace(config_of(folder, 2), device=device)  # type: ignore[arg-type]
    executor._places, executor._serving = places_of(2, 1), Crew()  # type: ignore[assignment]
    assert executor.determine_num_available_blocks(1 << 20, 16) == expected
