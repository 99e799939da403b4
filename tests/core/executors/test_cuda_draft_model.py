"""A draft model on a GPU: tokens are those without drafts, and a model is right about itself."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.engine import EngineCore
from core.executors.cuda import CudaExecutor
from core.process.resolve import resolve, resolve_costs
from core.scheduling.stats import SchedulerStats
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.speculation import SpeculativeConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest
from tests.core.executors.test_cuda_executor import Answers
from tests.triton_device import ANYWHERE
from tools.lab.bench.tiny_model import write_tiny_model

pytestmark = ANYWHERE

PROMPTS = [list(range(3, 14)), list(range(40, 43)), list(range(7, 10))]
BLOCKS = 7  # too few for three whole requests: one is preempted
SIZES: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_num_seqs": 3, "max_num_batched_tokens": 16}
SIZES |= {"max_model_len": 20, "block_size": 4, "num_blocks_override": BLOCKS}


@pytest.fixture(scope="module", name="model")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return str(folder)


def other_model(folder: Path) -> str:
    """The same sizes and other weights: all have the other sign."""
    write_tiny_model(folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    numbers = np.frombuffer(data, "<u2", offset=begin)
    numbers ^= 0x8000
    path.write_bytes(data)
    return str(folder)


def run(model: str, draft: str | None) -> tuple[Answers, SchedulerStats]:
    speculative = None
    if draft is not None:
        settings: dict[str, Any] = {"model": draft, "num_speculative_tokens": 3, "step_ns": (10**6,) * 8}
        speculative = SpeculativeConfig(method="draft_model", **settings)
    config = EngineConfig(device="cuda", model=model, speculative_config=speculative, **SIZES)
    executor = CudaExecutor(config)
    resolved = resolve(config, executor.info, lambda *_: BLOCKS, total_memory_bytes=1 << 34, num_cpus=1)
    assert resolved.async_scheduling == (draft is None)
    executor.initialize_cache(resolved)
    resolved = resolve_costs(resolved, config, executor.measure_costs, executor.measure_steps)
    engine, found = EngineCore(resolved, executor), Answers(len(PROMPTS))
    inbox: list[Any] = []
    for number, ids in enumerate(PROMPTS):
        params = SamplingParams(temperature=number / 2, seed=number, max_tokens=6, ignore_eos=True, logprobs=1)
        inbox.append((0, AddRequest(number, np.array(ids, "<i4").tobytes(), params, number)))
    found.follow(engine, inbox)
    return found, engine.scheduler.stats


def test_tokens_are_those_without_drafts(model: str, tmp_path: Path) -> None:
    plain, stats = run(model, None)
    assert stats.num_preemptions > 0
    own, stats = run(model, model)
    assert (own.tokens, own.logprobs) == (plain.tokens, plain.logprobs)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 5
    other, stats = run(model, other_model(tmp_path))
    assert (other.tokens, other.logprobs) == (plain.tokens, plain.logprobs)
    assert stats.num_accepted_tokens < stats.num_draft_tokens


def test_drafts_are_measured_until_the_given_clock_ends(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of all GPUs of a group, each of which computes its part of as many trials."""
    settings = SpeculativeConfig(method="draft_model", model=model, num_speculative_tokens=3)
    config = EngineConfig(device="cuda", model=model, speculative_config=settings, **SIZES)
    executor = CudaExecutor(config)
    executor.initialize_cache(resolve(config, executor.info, lambda *_: BLOCKS, total_memory_bytes=1 << 34, num_cpus=1))
    drafter, seconds, steps = executor.runner.drafter, itertools.count(), list[None]()
    assert drafter is not None
    monkeypatch.setattr(drafter, "step", lambda *_: steps.append(None))
    assert executor.runner.measure_drafts(lambda: next(seconds) * 10**9) == 10**9
    assert len(steps) == 2, "the first one is not measured, and the second one ends the measurement"


def test_blocks_of_both_models_count(model: str) -> None:
    settings = SpeculativeConfig(method="draft_model", model=model, num_speculative_tokens=3)
    config = EngineConfig(device="cuda", model=model, **SIZES)
    alone, drafting = (
        CudaExecutor(msgspec.structs.replace(config, speculative_config=given)).determine_num_available_blocks(
            1 << 20, 4
        )
        for given in (None, settings)
    )
    assert drafting == (alone - 3) // 2, "a spare block for each of 3 rows"


def test_steps_with_a_draft_model_do_not_overlap(model: str) -> None:
    settings = SpeculativeConfig(method="draft_model", model=model)
    with pytest.raises(ConfigError, match=r"async_scheduling=true: .* needs each step's tokens"):
        EngineConfig(device="cuda", model=model, speculative_config=settings, async_scheduling=True)
