"""A steady step of the model runner: as many Python calls for 40 rows as for one, and few; nothing is timed."""

import pytest

from core.engine import EngineCore
from core.execution.executor import FinishedStep, ModelInfo, StepHandle
from core.execution.plan import SchedulerOutput
from core.runner.model_runner import ModelRunner
from kernels.elements import FLOAT32
from tests.core.runner.invariance import request, tiny_model
from tests.core.test_step_cost import count_calls
from tests.resolved import resolved_config

CONFIG = resolved_config(max_num_seqs=40, max_num_batched_tokens=512, num_blocks_override=100, max_model_len=200)


class Counting:
    """An executor that counts the calls of each step that it runs."""

    def __init__(self) -> None:
        self.info = ModelInfo("tiny", "", "float32", 500, 2048, (0,), "L2")
        self.counts: list[int] = []
        self._runner = ModelRunner(
            tiny_model(FLOAT32),
            num_rows=CONFIG.max_num_seqs,
            num_blocks=100,
            block_size=CONFIG.block_size,
            eos_token_ids=(0,),
        )

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        count, output = count_calls(lambda: self._runner.execute(plan))
        self.counts.append(count)
        return FinishedStep(output)

    def close(self) -> None: ...


@pytest.mark.parametrize(("temperature", "most"), [(0.0, 60), (1.0, 78)])
def test_a_steady_step_makes_the_same_few_calls_for_one_row_and_for_many(temperature: float, most: int) -> None:
    """The largest logits come with the step: a greedy one does not look for them again."""
    counts = []
    for num_rows in (1, 40):
        engine = EngineCore(CONFIG, executor := Counting())
        engine.step([request(n, [n + 1, 2, 3], 9, temperature) for n in range(num_rows)], 0)
        for _ in range(4):
            engine.step([], 0)
        counts.append(executor.counts[-2:])
    assert counts[0] == counts[1]
    assert max(counts[0]) <= most, counts
