"""EAGLE-3 heads and layers for multi-token prediction on a GPU: drafts of a plain reference, and no token changes."""

from pathlib import Path
from typing import Any

import pytest

from core.executors.cuda import CudaExecutor
from core.runner import mixed_graphs
from tests.core.draft_heads import EAGLE3, LLAMA, MIMO, Reference, model_shapes, random_weights, write, write_eagle3
from tests.core.executors.test_draft_head import GREEDY, config_of, run
from tests.core.runner.test_mixed_graphs import RecordingPool
from tests.triton_device import ANYWHERE

pytestmark = ANYWHERE

#: Too few blocks for all requests, which are swapped out and in.
OPTIONS: dict[str, Any] = {"device": "cuda", "max_num_seqs": 3, "max_model_len": 48, "async_scheduling": False}
OPTIONS |= {"num_blocks_override": 8, "preemption_mode": "swap", "num_swap_blocks": 12, "num_drafts": 2}


class WithGraphs(CudaExecutor):
    """Steps with prompts are graphs, which are imitated by a recording."""

    pools: list[RecordingPool] = []  # noqa: RUF012  of all executors

    def initialize_cache(self, config: Any) -> None:
        super().initialize_cache(config)
        made: Any = self.runner
        pool = RecordingPool()
        made._graph_pool, made.graphs = pool, type("None", (), {"capture_all": list, "sizes": lambda *_: ()})()
        made.capture_graphs(drafts=True, num_tokens=config.max_num_batched_tokens)
        made.graphs = None
        self.pools.append(pool)


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_drafts_are_those_of_the_reference_and_no_token_changes(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden states that an EAGLE-3 head reads are from graphs of steps with prompts."""
    monkeypatch.setattr(mixed_graphs, "_SMALL", (16, 48))
    monkeypatch.setattr(WithGraphs, "pools", [])
    settings = {**(LLAMA if method == "eagle3" else MIMO), "num_hidden_layers": 3}
    model = write(tmp_path / "model", settings, random_weights(model_shapes(settings), 1))
    head = None
    if method == "eagle3":
        own = {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [2, 3, 3], "norm_before_fc": True}
        head = write_eagle3(tmp_path / "head", own)
    sizes: dict[str, Any] = {"num_requests": 3, "make": CudaExecutor, "num_tokens": 6}
    plain, _, _ = run(config_of(model, None, **OPTIONS), GREEDY, **sizes)
    if head is not None:
        sizes["make"] = WithGraphs
    found, stats, heard = run(config_of(model, method, head, **OPTIONS), GREEDY, **sizes)
    assert [pool.num_replayed > 0 for pool in WithGraphs.pools] == [True] * (head is not None)
    assert found == plain
    assert stats.num_swapped_in_blocks > 0
    reference = Reference(Path(model), None if head is None else Path(head), (2, 3, 3) if head is not None else ())
    for tokens, drafts in heard[::3]:
        reference.check(tokens, drafts)
    assert len(heard) > 5
