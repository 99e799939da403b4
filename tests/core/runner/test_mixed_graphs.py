"""Steps with prompts as CUDA graphs: padded, chosen by size, captured at the start, and no bit changes.

A graph is imitated by a recording that runs the same function on the same tensors.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.runner import cuda_model_runner, device_columns, mixed_graphs
from core.runner.mixed_graphs import MixedGraphs, MixedSize, token_sizes
from ipc.params.sampling_params import SamplingParams
from kernels.triton.attention_work import TritonWork
from tests.core.executors import test_cuda_executor as engine
from tests.core.executors.test_cuda_invariance import use_splits
from tests.triton_device import ANYWHERE

pytestmark = ANYWHERE


class RecordingPool:
    """Graphs that run Python again."""

    def __init__(self, *_: Any) -> None:
        self.num_captured = self.num_replayed = 0

    def capture(self, launch: Callable[[], None]) -> Any:
        launch()
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            launch()

        return type("Graph", (), {"replay": staticmethod(replay)})


def int32s(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def work_of(num_tokens: int, num_decodes: int, num_tiles: int, num_splits: int = 1, **others: Any) -> TritonWork:
    each = torch.arange(num_tokens, dtype=torch.int32)
    return TritonWork(
        each,
        each + 5,
        int32s(0),
        each[:num_decodes],
        each[:num_tiles],
        each[:num_tiles] + 1,
        num_splits,
        None,
        **others,
    )


def test_sizes_are_those_of_a_products_tiles() -> None:
    assert token_sizes(8192) == [64, 128, *range(256, 4097, 256)]
    assert token_sizes(300) == [64, 128, 256, 512]
    assert token_sizes(1) == [64]


def test_lists_of_work_are_padded_and_the_smallest_graph_is_used() -> None:
    seen: list[tuple[MixedSize, list[list[int]]]] = []

    def run(work: TritonWork, hidden: torch.Tensor) -> None:
        lists = work.rows, work.positions, work.decode_tokens, work.tile_tokens, work.tile_counts
        assert all(each.data_ptr() % 16 == 0 for each in lists), "another alignment is another kernel"
        seen.append((MixedSize(len(work.rows), work.num_splits), [each.tolist() for each in lists]))
        hidden.copy_(work.rows[:, None])

    pool: Any = RecordingPool()
    graphs = MixedGraphs(run, int32s(0), pool, num_tokens=200, num_rows=40, group_size=16, width=3, most_splits=20)
    assert graphs.size_of(work_of(9, 1, 1)) is not None
    graphs.capture_all()
    sizes = [size for size, _ in seen]
    assert sizes == sorted(sizes, reverse=True), "the largest first"
    assert {size.num_tokens for size in sizes} == {64, 128, 256}
    assert {size.num_splits for size in sizes} == {1, 4, 16, 20}
    assert all(value == -1 for _, lists in seen for each in lists for value in each), "a capture computes nothing"
    for work, expected in (
        (work_of(50, 40, 2), MixedSize(64, 1)),
        (work_of(64, 3, 40, 2), MixedSize(64, 4)),
        (work_of(64, 3, 41), MixedSize(128, 1)),  # of 8 tokens, and for 32 prompts
        (work_of(129, 3, 1, 17), MixedSize(256, 20)),
    ):
        size = graphs.size_of(work)
        assert size == expected
        assert graphs(work, size).tolist() == work.rows[:, None].expand(-1, 3).tolist()
        _, lists = seen[-1]
        for given, padded in zip((work.rows, work.positions, work.decode_tokens, *work[4:6]), lists, strict=True):
            assert padded[: len(given)] == given.tolist()
            assert set(padded[len(given) :]) <= {-1}
    assert pool.num_captured == len(sizes) == len(graphs.captured)
    for work in (
        work_of(257, 1, 1),
        work_of(64, 41, 1),
        work_of(64, 1, 1, 21),
        work_of(64, 1, 1, shared=int32s(1)),
        work_of(64, 1, 1, common=int32s(1)),
    ):
        assert graphs.size_of(work) is None, "it is launched kernel by kernel"


def with_mixed_graphs(runner: Any, num_tokens: int) -> RecordingPool:
    """Give a runner graphs for its steps with prompts of up to so many tokens, and none for others."""
    pool = RecordingPool()
    runner._graph_pool, runner.graphs = pool, type("None", (), {"capture_all": int, "sizes": lambda *_: 0})
    runner.capture_graphs(drafts=False, num_tokens=num_tokens)
    runner.graphs = None
    return pool


def test_a_runner_gives_the_same_bits_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks next to rows that decode, beyond a split; nothing is captured once it is ready."""
    use_splits(32, monkeypatch)
    for module in (cuda_model_runner, device_columns):
        monkeypatch.setattr(module, "SPLIT", 32)
    monkeypatch.setattr(mixed_graphs, "_SMALL", (32,))
    options: list[dict[str, Any]] = [{"temperature": 0, "logprobs": 2}, {"temperature": 1.5, "logprobs": 1}]
    requests = [
        (engine.ids(34 + 15 * number, number), SamplingParams(max_tokens=3, ignore_eos=True, **each))
        for number, each in enumerate(options)
    ]
    expected = engine.run("triton", requests, 2, shape="routed MLPs")
    plain, pools = engine.runner, list[RecordingPool]()

    def with_graphs(*given: Any) -> Any:
        made: Any = plain(*given)
        pools.append(with_mixed_graphs(made, 32))
        return made

    monkeypatch.setattr(engine, "runner", with_graphs)
    got = engine.run("triton", requests, 2, shape="routed MLPs")
    assert (got.tokens, got.logprobs) == (expected.tokens, expected.logprobs)
    (pool,) = pools
    assert pool.num_captured == 2, "of 32 tokens, with one split and with three"
    assert pool.num_replayed >= 4
