"""The engine on a GPU (`make gpu`): the demo model's goldens, bfloat16, graphs, depth, drafts, preemption, memory."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from core.engine import EngineCore
from core.executors.cuda import CudaExecutor
from core.process.resolve import resolve, resolve_costs
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig, PreemptionMode
from ipc.options.speculation import SpeculativeConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, Outputs
from tests.core.hostile_drafts import speculative, use
from tests.core.models.test_golden import GOLDEN
from tests.core.runner.test_several_samples import next_tokens
from tests.triton_device import GPU_ONLY
from tools.lab.bench.tiny_model import VOCAB_SIZE, write_tiny_model

pytestmark = GPU_ONLY

#: Batches of these sizes need no padding in a graph, so that torch's products have as many rows with graphs as without.
NUM_REQUESTS = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder)
    return folder


def requests(length: int, max_tokens: int, **options: Any) -> list[AddRequest]:
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
    prompts = rng.integers(3, VOCAB_SIZE, (NUM_REQUESTS, length)).astype("<i4")
    return [AddRequest(number, ids.tobytes(), params, seed=number) for number, ids in enumerate(prompts)]


class Engine:
    def __init__(self, model: Path, **options: Any) -> None:
        config = EngineConfig(model=str(model), device="cuda", max_num_batched_tokens=128, **options)
        executor = CudaExecutor(config)
        resolved = resolve(
            config,
            executor.info,
            executor.determine_num_available_blocks,
            total_memory_bytes=1 << 30,
            num_cpus=1,
            device_bytes=executor.cache_memory_bytes(),
        )
        executor.initialize_cache(resolved)
        resolved = resolve_costs(resolved, config, executor.measure_costs, executor.measure_steps)
        self.config, self.executor, self.engine = resolved, executor, EngineCore(resolved, executor)

    def run(self, messages: list[AddRequest]) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in messages]
        inbox: list[tuple[int, Any]] = [(0, message) for message in messages]
        while inbox or self.engine.has_work:
            for _, message in self.engine.step(inbox, 0):
                assert isinstance(message, Outputs), message
                counts = np.frombuffer(message.counts, "<u2").tolist()
                values = iter(np.frombuffer(message.tokens, "<i4").tolist())
                for number, count in zip(np.frombuffer(message.numbers, "<u4").tolist(), counts, strict=True):
                    tokens[number] += [next(values) for _ in range(count)]
            inbox = []
        return tokens


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_demo_models_goldens(async_scheduling: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    messages = [
        AddRequest(number, np.array(row["prompt_token_ids"], "<i4").tobytes(), params, seed=0)
        for number, row in enumerate(GOLDEN)
    ]
    engine = Engine(resolve_model(None), dtype="float32", async_scheduling=async_scheduling)
    assert engine.run(messages) == [row["token_ids"] for row in GOLDEN]


def test_the_demo_model_in_bfloat16_begins_as_its_goldens() -> None:
    """bfloat16 parts from float32 sooner or later; most answers begin alike."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    messages = [
        AddRequest(number, np.array(row["prompt_token_ids"], "<i4").tobytes(), params, seed=0)
        for number, row in enumerate(GOLDEN)
    ]
    answers = Engine(resolve_model(None), dtype="bfloat16", async_scheduling=True).run(messages)
    alike = sum(answer == row["token_ids"][:4] for answer, row in zip(answers, GOLDEN, strict=True))
    assert alike * 2 >= len(GOLDEN), answers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_change_nothing(tiny: Path, dtype: str, temperature: float) -> None:
    messages = requests(20, 30, temperature=temperature)
    with_graphs = Engine(tiny, dtype=dtype, num_blocks_override=200)
    without = Engine(tiny, dtype=dtype, num_blocks_override=200, enforce_eager=True)
    assert with_graphs.run(messages) == without.run(messages)
    assert with_graphs.executor.runner.graphs is not None
    assert len(with_graphs.executor.runner.graphs.captured) > 0
    assert without.executor.runner.graphs is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_depth_changes_nothing(tiny: Path, temperature: float) -> None:
    messages = requests(300, 40, temperature=temperature, top_p=0.9)
    shallow, deep = (Engine(tiny, dtype="float32", async_scheduling=overlaps) for overlaps in (False, True))
    assert deep.run(messages) == shallow.run(messages)


def drafts(method: str = "ngram", **options: Any) -> SpeculativeConfig:
    """With these durations each draft that may be right is tried."""
    return SpeculativeConfig(**{"method": method, "prompt_lookup_min": 1, "step_ns": (10**8,) * 8, **options})


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_the_demo_models_goldens_with_drafts(method: str, async_scheduling: bool) -> None:
    """In float32 torch's products of other numbers of rows do not differ enough to change these tokens."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    messages = [
        AddRequest(number, np.array(row["prompt_token_ids"], "<i4").tobytes(), params, seed=0)
        for number, row in enumerate(GOLDEN)
    ]
    options = {"async_scheduling": async_scheduling, "speculative_config": drafts(method)}
    engine = Engine(resolve_model(None), dtype="float32", **options)
    for message, row in zip(messages, GOLDEN, strict=True):  # one after the other: alone each gets drafts
        assert engine.run([msgspec.structs.replace(message, number=0)]) == [row["token_ids"]]
    stats = engine.engine.scheduler.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_drafts_change_nothing(tiny: Path, async_scheduling: bool, temperature: float) -> None:
    """Steps with drafts run as graphs of more rows than there are requests, and without graphs."""
    messages = requests(300, 40, temperature=temperature)
    plain = Engine(tiny, dtype="float32").run(messages)
    for eager in (False, True):
        engine = Engine(tiny, dtype="float32", enforce_eager=eager, async_scheduling=async_scheduling)
        settings = msgspec.structs.replace(engine.config, speculative_config=speculative())
        engine.engine = EngineCore(settings, engine.executor)
        use(engine.engine.scheduler, "random", partial(partial, next_tokens, dict(enumerate(plain))), VOCAB_SIZE)
        assert engine.run(messages) == plain
        stats = engine.engine.scheduler.stats
        assert stats.num_draft_tokens > stats.num_accepted_tokens > 20
        if (graphs := engine.executor.runner.graphs) is not None:
            assert max(size for size, *_ in graphs.captured) > NUM_REQUESTS


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_durations_of_steps_are_measured(tiny: Path, async_scheduling: bool) -> None:
    settings = drafts(step_ns=())
    engine = Engine(tiny, dtype="bfloat16", async_scheduling=async_scheduling, speculative_config=settings)
    measured = engine.config.speculative_config
    assert measured is not None
    assert len(measured.step_ns) == 8, "1, 2, 4, ... 128 tokens"
    assert measured.draft_ns == 0 or async_scheduling, "what the device waits for launches"
    assert engine.executor.runner.graphs is not None
    sizes = {size for size, *_ in engine.executor.runner.graphs.captured}
    assert {1, 2, 4, 8, 16, 32, 64, 128} <= sizes


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preemption_changes_nothing(tiny: Path, async_scheduling: bool, mode: PreemptionMode) -> None:
    messages = requests(14, 40, temperature=0)
    roomy = Engine(tiny, dtype="float32", num_blocks_override=200)
    options = {"async_scheduling": async_scheduling, "preemption_mode": mode, "swap_space_bytes": 1 << 24}
    tight = Engine(tiny, dtype="float32", num_blocks_override=11, **options)
    assert tight.run(messages) == roomy.run(messages)
    stats = tight.engine.scheduler.stats
    assert stats.num_preemptions > 0
    if mode != "auto":
        assert (stats.num_swapped_in_blocks > 0) == (mode == "swap")


def test_the_cache_takes_what_is_left_of_the_memory(tiny: Path) -> None:
    total = torch.cuda.mem_get_info()[1]
    half = CudaExecutor(EngineConfig(model=str(tiny), device="cuda", gpu_memory_utilization=0.5)).cache_memory_bytes()
    assert half is not None
    assert total // 4 < half < total // 2
