"""Steps with tokens of images as CUDA graphs: captured before the first step, none afterwards, and no bit changes.

A graph is imitated by a recording that runs the same function on the same tensors.
"""

from typing import Any

import pytest

from core.executors.cuda import CudaMemory
from core.models.operations.triton_operations import TritonOperations
from core.runner import mixed_graphs
from core.runner.cuda_model_runner import CudaModelRunner
from ipc.options.config import EngineConfig
from tests.core.executors.test_cuda_features import Encoder, Engine, model, of
from tests.core.runner.test_mixed_graphs import RecordingPool, with_mixed_graphs
from tests.triton_device import ANYWHERE

pytestmark = ANYWHERE

KINDS = ("grids", "wholes", "wholes in windows")
SOAKS = [pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS[1:]]


class Graphs:
    """Engines whose steps with prompts are graphs of up to 16 tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools = list[RecordingPool]()
        plain = CudaModelRunner.__init__

        def init(made: CudaModelRunner, *others: Any, **options: Any) -> None:
            plain(made, *others, **options)
            self.pools.append(with_mixed_graphs(made, 16))

        monkeypatch.setattr(CudaModelRunner, "__init__", init)


@pytest.mark.parametrize("kind", ["grids", *SOAKS])
def test_no_bit_changes_and_nothing_is_captured_later(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts are an image's first rows, its last ones next to text, and, in another row, text alone."""
    expected = Engine(kind, budget=13).run([0, 1])
    monkeypatch.setattr(mixed_graphs, "_SMALL", (8, 16))
    graphs = Graphs(monkeypatch)
    engine = Engine(kind, budget=13)
    (pool,) = graphs.pools
    assert pool.num_captured == 2
    got = engine.run([0, 1])
    assert [of(got, number) for number in (0, 1)] == [of(expected, number) for number in (0, 1)]
    assert pool.num_captured == 2
    assert pool.num_replayed >= 3, "the prompts take three steps"


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_kept_for_the_largest_graph(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has room for an image in each of its tokens."""
    one, seen = model(kind, "cuda"), list[Any]()
    assert isinstance(one.operations, TritonOperations)
    memory = CudaMemory(one, one.operations, EngineConfig(max_num_batched_tokens=40), Encoder(kind))
    compute = one.hidden_states

    def noted(inputs: Any) -> Any:
        seen.append(inputs)
        return compute(inputs)

    monkeypatch.setattr(one, "hidden_states", noted)
    memory.largest_graph()
    (inputs,) = seen
    assert inputs.given.rows.shape == (64, Encoder(kind).width)
    assert (inputs.turned is not None) == (kind == "grids")
    assert any(work.lasts is not None for work in inputs.attention) == (kind != "grids")
