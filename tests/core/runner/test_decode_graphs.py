"""DecodeGraphs with torch.cuda's graphs played by a recording: what is captured, padded and replayed, and that a runner
gives the same tokens through them. That real graphs do what the recording does, `make gpu` tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.runner import decode_graphs
from core.runner.decode_graphs import Decode, DecodeGraphs, Drafted, padded_rows, padded_splits
from core.runner.mixed_graphs import Mixed, MixedGraphs
from ipc.params.sampling_params import SamplingParams
from kernels.triton.attention_work import TritonWork
from tests.core.executors import test_cuda_executor as engine
from tests.core.executors import test_cuda_recurrent as recurrent
from tests.core.executors import test_cuda_speculation as drafting
from tests.triton_device import ANYWHERE, ON_GPU

pytestmark = [*ANYWHERE, pytest.mark.skipif(ON_GPU, reason="graphs are real there")]


class Recording:
    """A graph that runs Python again: whatever was called while it was captured."""

    current: "Recording | None" = None

    def __init__(self) -> None:
        self.run: Callable[[], None] | None = None

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        Recording.current = self

    def capture_end(self) -> None:
        Recording.current = None

    def replay(self) -> None:
        assert self.run is not None
        self.run()


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Gives the sizes of the graphs that are captured."""
    captured: list[tuple[int, int]] = []

    streams: list[SimpleNamespace] = []

    def new_stream(device: torch.device) -> SimpleNamespace:
        streams.append(SimpleNamespace(wait_stream=lambda other: None))
        assert len(streams) < 5, "one for all graphs of a runner: each keeps a workspace of cuBLAS"
        return streams[-1]

    @contextmanager
    def use(stream: object) -> Iterator[None]:
        assert stream is streams[-1], "captured where it was warmed up"
        yield

    fake = {
        "graph_pool_handle": lambda: 0,
        "Stream": new_stream,
        "current_stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
        "stream": use,
        "CUDAGraph": Recording,
    }
    for name, value in fake.items():
        monkeypatch.setattr(decode_graphs.torch.cuda, name, value)
    init = DecodeGraphs.__init__

    def recorded(self: DecodeGraphs, decode: Decode, *others: Any, **options: Any) -> None:
        def traced(rows: torch.Tensor, *given: Any) -> None:
            decode(rows, *given)
            if (recording := Recording.current) is not None:
                captured.append((len(rows), given[3]))
                recording.run = lambda: decode(rows, *given)

        init(self, traced, *others, **options)

    monkeypatch.setattr(DecodeGraphs, "__init__", recorded)
    mixed_init = MixedGraphs.__init__

    def recorded_mixed(self: MixedGraphs, run: Mixed, *others: Any, **options: Any) -> None:
        def traced(work: TritonWork, hidden: torch.Tensor) -> None:
            run(work, hidden)
            if (recording := Recording.current) is not None:
                captured.append((len(work.rows), work.num_splits))
                recording.run = lambda: run(work, hidden)

        mixed_init(self, traced, *others, **options)

    monkeypatch.setattr(MixedGraphs, "__init__", recorded_mixed)
    return captured


def test_inputs_are_padded_and_a_graph_is_captured_once_for_each_size(cuda: list[tuple[int, int]]) -> None:
    seen: list[list[list[int]]] = []
    places: set[int] = set()

    def decode(
        rows: torch.Tensor, positions: torch.Tensor, drafted: Any, common: Any, num_splits: int, hidden: torch.Tensor
    ) -> None:
        assert drafted is None
        assert common is None
        seen.append([rows.tolist(), positions.tolist()])
        places.update((rows.data_ptr(), positions.data_ptr(), hidden.data_ptr()))
        hidden.copy_((rows + 100 * positions * num_splits)[:, None])

    def int32s(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    graphs = DecodeGraphs(decode, torch.device("cpu"), 9, 1)
    hidden = graphs(int32s(5, 6, 7, 8, 9), int32s(1, 2, 3, 4, 5), 3)
    assert seen[-1] == [[5, 6, 7, 8, 9, -1, -1, -1], [1, 2, 3, 4, 5, -1, -1, -1]]
    assert hidden[:, 0].tolist() == [405, 806, 1207, 1608, 2009]
    assert graphs(int32s(3, 4, 5, 6, 7, 8), int32s(0, 0, 0, 0, 0, 0), 4)[:, 0].tolist() == [3, 4, 5, 6, 7, 8]
    graphs(int32s(1), int32s(2), 1)
    assert seen[-1] == [[1], [2]]
    assert cuda == [(8, 4), (1, 1)]
    assert seen[0] == [[-1] * 8] * 2  # what is captured writes nothing
    assert len(places) == 3, "all graphs have the same inputs and result"
    assert {place % 16 for place in places} == {0}


def test_sizes_with_drafts_are_few(cuda: list[tuple[int, int]]) -> None:
    seen: list[list[int]] = []
    stored: list[list[int]] = []

    def decode(
        rows: torch.Tensor, positions: torch.Tensor, drafted: Any, common: Any, num_splits: int, hidden: torch.Tensor
    ) -> None:
        seen.append(next((each.tolist() for each in (*(drafted or ()), common) if each is not None), []))
        stored.append([] if drafted is None else drafted.saves.tolist())
        hidden.copy_(rows[:, None])

    graphs = DecodeGraphs(decode, torch.device("cpu"), 21, 1)
    for count in (1, 3, 9, 12, 17):
        rows = torch.arange(count, dtype=torch.int32)
        assert graphs(rows, rows, 1, Drafted(rows + 7, rows + 5))[:, 0].tolist() == rows.tolist()
        if count == 3:
            assert seen[-1] == [7, 8, 9, 1], "padding has a program of its own"
            assert stored[-1] == [5, 6, 7, -1], "and stores no state"
    assert [size for size, _ in cuda] == [1, 4, 16, 24], "17 would be 32, and there is room for 24"
    assert graphs(rows, rows, 1).tolist() == graphs(rows, rows, 1, Drafted(rows, rows)).tolist()
    assert cuda[4:] == [(24, 1)], "one of the same size without drafts is another"
    for count in (3, 2):
        graphs(rows, rows, 1, None, torch.tensor([count], dtype=torch.int32))
        assert seen[-1] == [count], "what rows have in common is an input"
    assert cuda[5:] == [(24, 1)]


def test_a_runner_gives_the_same_tokens_with_graphs(
    cuda: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.5}, {"temperature": 0, "logprobs": 1}]
    requests = [
        (engine.ids(3 + number, number), SamplingParams(max_tokens=3 + number, ignore_eos=True, **each))
        for number, each in enumerate(options)
    ]
    expected = engine.run("triton", requests)
    plain = engine.runner

    def with_graphs(*options: Any) -> Any:
        made = plain(*options)
        made.graphs = made.make_graphs(4)  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr(engine, "runner", with_graphs)
    for depth in (1, 2):
        got = engine.run("triton", requests, depth)
        assert got.tokens == expected.tokens
        assert got.logprobs.keys() == expected.logprobs.keys()
    assert set(cuda) == {(4, 1), (2, 1), (1, 1)}


def test_a_runner_with_drafts_gives_the_same_tokens_with_graphs(
    cuda: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's drafts are as many rows of a graph."""
    plain = drafting.runner

    def with_graphs(*options: Any, **others: Any) -> Any:
        made = plain(*options, **others)
        made.graphs = None if others["on_cpu"] else made.make_graphs(made.most_alone)  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr(drafting, "runner", with_graphs)
    got, core = drafting.run(drafting.config("ngram", 2), hostile="random", numbers=(0, 1))
    drafting.check(got)
    assert core.scheduler.stats.num_accepted_tokens > 0
    assert {size for size, _ in cuda} >= {1, 2, 4, 8}, "two rows, and with their drafts more"


def test_recurrent_states_are_found_and_stored_within_graphs(cuda: list[tuple[int, int]], tmp_path: Path) -> None:
    """Rows have changed their slots by drafts, and go on in graphs with drafts and without."""
    folder = recurrent.write(tmp_path, recurrent.KINDS_OF_LAYERS["short convolution"])
    right = recurrent.engine_of(folder, None).run([0, 1, 2], recurrent.NUM_TOKENS, recurrent.ASKED)

    def with_graphs(engine: recurrent.Engine) -> recurrent.Engine:
        made: Any = engine.executor.runner
        made.graphs = made.make_graphs(made.most_alone)
        return engine

    got = recurrent.run_hostile(with_graphs(recurrent.engine_of(folder, recurrent.drafts())), "random", right)
    assert (got.tokens, got.logprobs) == (right.tokens, right.logprobs)
    assert {size for size, _ in cuda} >= {1, 2, 4, 8}


def test_sizes() -> None:
    assert [padded_rows(n) for n in (1, 2, 3, 4, 5, 8, 9, 65, 250, 257)] == [1, 2, 4, 4, 8, 8, 16, 80, 256, 288]
    assert [padded_splits(n) for n in (1, 2, 3, 4, 5, 33)] == [1, 4, 4, 4, 16, 64]


def test_all_sizes_are_captured_at_start_and_none_afterwards(cuda: list[tuple[int, int]]) -> None:
    """For up to 256 rows with any context, in fewer than 150 graphs, the largest first."""

    def decode(
        rows: torch.Tensor, positions: torch.Tensor, drafted: Any, common: Any, num_splits: int, hidden: torch.Tensor
    ) -> None:
        hidden.copy_(rows[:, None])

    graphs = DecodeGraphs(decode, torch.device("cpu"), 256, 1, most_splits=128)
    for rows in (512, 513):
        assert graphs.fits(graphs.size_of(rows, 1)) == (rows == 512)
    graphs.capture_all(graphs.sizes(256, 0))
    assert cuda[0] == (256, 128)
    assert [size for size, _ in cuda] == sorted((size for size, _ in cuda), reverse=True)
    before = len(cuda)
    assert before == len(graphs.captured) < 150
    common = torch.ones(1, dtype=torch.int32)
    for count in range(1, 257):
        rows = torch.arange(count, dtype=torch.int32)
        for splits in (1, 7, 128):
            assert graphs.fits(graphs.size_of(count, splits))
            assert graphs(rows, rows, splits)[-1].tolist() == [count - 1]
        if count > 1:
            assert graphs.fits(graphs.size_of(count, 9, has_common=True))
            graphs(rows, rows, 9, None, common)
    assert len(cuda) == before
    assert not graphs.fits(graphs.size_of(9, 1, shares=True)), "drafts of grammars are launched kernel by kernel"
    drafting = DecodeGraphs(decode, torch.device("cpu"), 40, 1, most_splits=2)
    drafting.capture_all(drafting.sizes(8, 32))
    assert all(drafting.fits(drafting.size_of(count, 2, shares=True)) for count in range(2, 41))


def test_a_runner_captures_nothing_once_it_is_ready(
    cuda: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ready = engine.runner, list[int]()

    def with_graphs(*options: Any) -> Any:
        made: Any = plain(*options)
        made.graphs = made.make_graphs(4)
        made.capture_graphs(drafts=False, num_tokens=32)
        ready.append(len(cuda))
        return made

    requests = [(engine.ids(9, number), SamplingParams(temperature=0, max_tokens=4 + number)) for number in range(3)]
    expected = engine.run("triton", requests)
    monkeypatch.setattr(engine, "runner", with_graphs)
    assert engine.run("triton", requests, 2).tokens == expected.tokens
    assert ready == [len(cuda)] == [4]
    assert cuda[0] == (64, 1), "the graph of prompts comes first"
