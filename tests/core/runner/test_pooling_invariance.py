"""An embedding is a function of its prompt alone, bit for bit: alone, beside others, in chunks, from the prefix cache,
preempted; with every variant of the C kernels that this CPU runs."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from core.engine import EngineCore
from core.execution.executor import FinishedStep, ModelInfo
from core.execution.plan import SchedulerOutput
from core.grammars.grammars import Grammars
from core.models.llama import Llama
from core.pooling.pooler import Method, Pooler
from core.runner.model_runner import ModelRunner
from frontend.client.journal import vectors_of
from ipc.options.config import EngineConfig
from ipc.params.pooling_params import PoolingParams, PoolingTask
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, Outputs
from ipc.wire.pooling_messages import AddPooling
from kernels.cpu.build import usable_variants
from kernels.cpu.library import load_cpu_library
from tests.core.driving import small_config
from tests.core.runner.invariance import DTYPES, tiny_model
from tests.in_turn import in_turn

TASKS: list[tuple[Method, PoolingTask]] = [
    ("last", "embed"),
    ("mean", "embed"),
    ("max", "embed"),
    ("cls", "token_embed"),
]
#: Options of an engine in which a request that arrives takes the target's row while it runs.
PREEMPTING = {
    "budget": 24,
    "max_num_seqs": 1,
    "scheduling_policy": "priority",
    "preemption_mode": "swap",
    "num_swap_blocks": 20,
}
RNG = np.random.Generator(np.random.PCG64(1))
PROMPT = RNG.integers(1, 500, 77)
OTHERS = [np.concatenate([PROMPT[:40], RNG.integers(1, 500, count)]) for count in (1, 30, 50)]


class PoolingExecutor:
    """A runner of a tiny model that pools."""

    def __init__(self, model: Llama, config: EngineConfig, method: Method) -> None:
        pooler = Pooler(method, model.config.hidden_size)
        self.info = ModelInfo("tiny", "", "float32", 500, 2048, (0,), "L2", pooler.tasks, pooler.whole_prompt_tasks)
        self.grammars = Grammars(dict, 500, (0,))
        assert config.num_blocks_override is not None
        self.runner = ModelRunner(
            model,
            num_rows=config.max_num_seqs,
            num_blocks=config.num_blocks_override,
            block_size=config.block_size,
            eos_token_ids=(0,),
            num_swap_blocks=config.num_swap_blocks or 0,
            pooler=pooler,
        )

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        return FinishedStep(self.runner.execute(plan))


def pooling(number: int, ids: np.ndarray, task: PoolingTask) -> AddPooling:  # type: ignore[type-arg]
    return AddPooling(number, ids.astype("<i4").tobytes(), PoolingParams(task=task))


def run(model: Llama, method: Method, task: PoolingTask, company: str) -> tuple[bytes, int]:
    """The prompt's vectors in this company, and how often a request was preempted."""
    options = {"chunks": {"budget": 7}, "preempted": PREEMPTING}.get(company, {})
    config = small_config(100, 8, max_model_len=160, **options)  # type: ignore[arg-type]
    engine = EngineCore(config, PoolingExecutor(model, config, method))  # type: ignore[arg-type]
    target = msgspec.structs.replace(pooling(1, PROMPT, task), priority=5)
    generation = [
        AddRequest(10 + n, ids.astype("<i4").tobytes(), SamplingParams(max_tokens=6, ignore_eos=True), n)
        for n, ids in enumerate(OTHERS)
    ]
    first, second = {
        "alone": ([target], []),
        "beside others": ([*generation, target, *(pooling(20 + n, ids, task) for n, ids in enumerate(OTHERS))], []),
        "chunks": ([target, generation[0]], []),
        "from the cache": ([pooling(2, PROMPT, "embed"), generation[1]], [target]),
        "preempted": ([target], [generation[1]]),
    }[company]
    found = b""
    for messages in (first, second):
        replies = engine.step([(0, message) for message in messages], 0)
        for _ in range(2 if company == "preempted" and messages is first else 500):
            for _, reply in replies:
                if isinstance(reply, Outputs) and reply.pooled is not None:
                    found += b"".join(vectors.tobytes() for number, vectors in vectors_of(reply.pooled) if number == 1)
            replies = engine.step([], 0) if engine.has_work else []
    assert not engine.has_unfinished
    return found, engine.scheduler.stats.num_preemptions


@pytest.fixture(params=usable_variants())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    load_cpu_library(request.param).stop_threads()


@pytest.mark.parametrize(("variant", "dtype"), in_turn(usable_variants(), DTYPES), indirect=["variant"])
def test_vectors_in_any_company_are_those_alone(dtype: str, variant: str) -> None:
    model = tiny_model(DTYPES[dtype], "plain", variant)
    num_preemptions = 0
    for method, task in TASKS:
        alone, _ = run(model, method, task, "alone")
        assert len(alone) == 4 * 96 * (77 if task == "token_embed" else 1)
        for company in ("beside others", "chunks", "from the cache", "preempted"):
            found, count = run(model, method, task, company)
            assert found == alone, (method, task, company)
            num_preemptions += count
    assert num_preemptions > 0, "nothing was preempted"
