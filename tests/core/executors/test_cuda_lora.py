"""Adapters on a GPU: the tokens of the C kernels, and log probabilities whose bits no other request changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.engine import EngineCore
from core.executors.cuda import CudaExecutor
from core.executors.local import LocalExecutor
from core.model_files.model_config import read_model_config
from core.process.resolve import resolve
from ipc.errors import OutOfMemoryError
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import AddRequest
from tests.core.adapters.peft_files import matrix_shapes, random_matrices, write_peft
from tests.core.executors.test_cuda_executor import Answers
from tests.triton_device import ANYWHERE
from tools.lab.bench.tiny_model import write_tiny_model

pytestmark = ANYWHERE

NAMES = ["", "all", "some"]
PROMPTS = [list(range(3, 12)), list(range(40, 45)), list(range(3, 12))]
SAMPLING = SamplingParams(temperature=0.9, seed=3, max_tokens=3, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module", name="options")
def model_and_adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("lora")
    write_tiny_model(folder / "tiny")
    shapes = matrix_shapes(read_model_config(folder / "tiny"))
    write_peft(folder / "all", random_matrices(shapes, 8, 1, size=5), rank=8, alpha=6)
    some = random_matrices(shapes, 5, 2, targets=("q_proj", "v_proj", "down_proj"), size=5)
    write_peft(folder / "some", some, rank=5, alpha=5)
    modules = {name: str(folder / name) for name in NAMES if name}
    return {"model": str(folder / "tiny"), "lora_modules": modules, "enable_lora": True}


def answers(executor: CudaExecutor | LocalExecutor, config: EngineConfig, which: list[int]) -> Answers:
    """Of some of the requests, each with its adapter."""
    resolved = resolve(config, executor.info, lambda *_: 40, total_memory_bytes=1 << 34, num_cpus=1)
    executor.initialize_cache(resolved)
    assert executor.adapters is not None
    digests = {listed.name: listed.digest for listed in executor.adapters.list()}
    engine, found = EngineCore(resolved, executor), Answers(len(PROMPTS))
    inbox: list[Any] = [
        (0, AddRequest(number, np.array(PROMPTS[number], "<i4").tobytes(), SAMPLING, number, adapter=adapter))
        for number in which
        for adapter in [AdapterId(digests[NAMES[number]]) if NAMES[number] else None]
    ]
    found.follow(engine, inbox)
    return found


def test_adapters_in_company_and_alone(options: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_num_seqs": 3, "max_num_batched_tokens": 8}
    config = EngineConfig(device="cuda", max_model_len=32, async_scheduling=True, **sizes, **options)
    executor = CudaExecutor(config)
    together = answers(executor, config, [0, 1, 2])
    for number in range(3):
        alone = answers(executor, config, [number])
        assert alone.tokens[number] == together.tokens[number]
        assert alone.logprobs == {key: one for key, one in together.logprobs.items() if key[0] == number}
    own = EngineConfig(max_model_len=32, **sizes, **options)
    by_cpu = answers(LocalExecutor(own), own, [0, 1, 2])
    assert by_cpu.tokens == together.tokens
    assert together.logprobs[0, 9] != together.logprobs[2, 9], "the same prompt, with and without an adapter"
    for key, entries in by_cpu.logprobs.items():
        np.testing.assert_allclose(
            [value for _, value in together.logprobs[key]], [value for _, value in entries], rtol=0, atol=1e-4
        )


def test_without_adapters_nothing_is_loaded(options: dict[str, Any]) -> None:
    executor = CudaExecutor(EngineConfig(model=options["model"], device="cuda", max_num_seqs=1))
    assert executor.adapters is None


def test_several_gpus_have_memory_for_max_loras(options: dict[str, Any]) -> None:
    """Both names of one adapter count once, and what is unloaded makes room."""
    from core.workers.sent_adapters import sent_adapters

    paths = options["lora_modules"]
    own = {**options, "lora_modules": {}}
    config = EngineConfig(device="cuda", tensor_parallel_size=2, max_loras=1, **own)
    adapters = sent_adapters(config)
    assert adapters is not None
    for name in ("first", "second"):
        adapters.load(name, paths["all"])
    with pytest.raises(OutOfMemoryError, match=r"max_loras=1 adapters are loaded or in use, .* unload one, or raise"):
        adapters.load("third", paths["some"])
    for name in ("first", "second"):
        assert adapters.unload(name)
    adapters.load("third", paths["some"])
