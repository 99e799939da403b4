"""The invariance tests would see it: the same comparisons must fail with an attention that depends on the chunk, with a
product that depends on the rows beside it, with reads of slots that no row may read, and with an option less.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from core.execution.plan import SchedulerOutput
from core.models.llama import Llama
from core.models.step import ONCE
from ipc.wire.messages import RequestFailed
from kernels.cpu.attention import CpuAttention
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.kv_cache import CpuKVCache
from kernels.elements import FLOAT32, Numbers
from kernels.torch.tensors import to_array, to_tensor
from tests.core.runner.invariance import (
    DTYPES,
    KINDS,
    Recorder,
    Run,
    difference,
    drive,
    neighbours,
    random_model,
    recorded_engine,
    request,
    run,
    small_config,
    tiny_model,
)
from tests.core.runner.invariance_scenarios import EDITS, FILTERS, PROMPT, Preempting, mixed, scenario
from tests.resolved import resolved_config


def cached(length: int) -> Callable[[Llama], Run]:
    return lambda model: run(model, PROMPT, first=[request(1, PROMPT[:length], 3, 0.0)])


def preempted(step: int) -> Callable[[Llama], Run]:
    return lambda model: run(model, PROMPT, between=Preempting({step}, forgets=True))


#: Each group of scenarios with nothing but what it varies: one chunk else, no neighbours, no shortage.
VARIED: dict[str, list[Callable[[Llama], Run]]] = {
    "neighbours, by the budget they take": [
        lambda model: run(model, PROMPT, neighbours=mixed(neighbours(32, 2, 60, 30)), budget=300),
        lambda model: run(model, PROMPT, neighbours=mixed(neighbours(32, 1, 60, 30)), budget=200),
    ],
    "chunks": [lambda model, budget=budget: run(model, PROMPT, budget=budget) for budget in (128, 37, 7)],  # type: ignore[misc]
    "preempted": [preempted(2), preempted(9), preempted(14)],
    "cached": [cached(290), cached(200), cached(100)],
}


def model_by_operations(dtype: str) -> Llama:
    """Return a model of its own whose steps call each operation by itself, so that one of them can be replaced."""
    model = random_model(KINDS["plain"], DTYPES[dtype])
    model.decoder = None
    return model


@pytest.mark.parametrize("group", VARIED)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_attention_that_depends_on_the_chunk_fails_the_comparison(
    dtype: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results are a little larger for some numbers of tokens in a step than for others."""
    model, exact = model_by_operations(dtype), CpuAttention.__call__

    def uneven(self: CpuAttention, q: Numbers, *rest: Any) -> Numbers:
        return to_array(to_tensor(exact(self, q, *rest)).mul_(1 + len(q) % 5 / 128))

    alone = run(model, PROMPT)
    assert [difference(each(model), alone) for each in VARIED[group]] == [""] * len(VARIED[group])
    monkeypatch.setattr(CpuAttention, "__call__", uneven)
    alone = run(model, PROMPT)
    for each in VARIED[group]:
        assert difference(each(model), alone).startswith("logits")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["among 32", "among 32 others"])
def test_a_product_that_depends_on_its_neighbours_fails_the_comparison(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product sums K in two halves from this number of rows on, as a library might."""
    model = model_by_operations(dtype)
    alone = run(model, PROMPT)
    exact = PackedMatrix.__call__

    def halved(self: PackedMatrix, x: Numbers) -> Numbers:
        if not 24 <= len(x) < 64:
            return exact(self, x)
        left, right = x.copy(), x.copy()
        left[:, self.in_features // 2 :] = 0
        right[:, : self.in_features // 2] = 0
        return to_array(to_tensor(exact(self, left)) + to_tensor(exact(self, right)))

    monkeypatch.setattr(PackedMatrix, "__call__", halved)
    assert difference(run(model, PROMPT), alone) == "", "the target alone has so many rows"
    assert difference(scenario(name, model), alone).startswith("logits")


def failed(recorder_type: type[Recorder]) -> list[int]:
    """Numbers of the requests that fail among a few whose blocks were others' before; some share a prompt."""
    config = small_config(num_blocks=20, rows=4, budget=64)
    engine, recorder = recorded_engine(tiny_model(FLOAT32), config, recorder_type)
    inbox = [request(n, PROMPT[n // 2 * 40 :][:37], 9, 0.5) for n in range(1, 7)]
    found: list[int] = []
    while inbox or engine.has_unfinished:
        found += [reply.number for _, reply in engine.step(inbox, 0) if isinstance(reply, RequestFailed)]
        inbox = []
    assert recorder.num_poisoned > 0, "no slot held the numbers of others"
    return sorted(found)


def test_nobody_fails_over_poison() -> None:
    assert failed(Recorder) == []


class OneSlotMore(Recorder):
    """Takes a sixth token of a row for one later than it is: one more slot is read than was computed."""

    def prepare(self, plan: SchedulerOutput) -> Any:
        inputs = super().prepare(plan)
        late = (self.sampling.seed[plan.rows] == 3) & (inputs.context_lens == 37 + 5)
        return inputs._replace(context_lens=inputs.context_lens + late, generation=ONCE)


class FreeBlock(Recorder):
    """Looks for a row's third block in one that is free."""

    def prepare(self, plan: SchedulerOutput) -> Any:
        inputs = super().prepare(plan)
        late = (self.sampling.seed[plan.rows] == 3) & (inputs.context_lens == 37 + 5)
        pool = self.scheduler.pool
        tables = inputs.block_tables.copy()
        tables[late, 2] = np.flatnonzero((pool.ref_count == 0) & ~(pool.names.content != 0))[0] if late.any() else 0
        return inputs._replace(block_tables=tables, generation=ONCE)


@pytest.mark.parametrize("recorder_type", [OneSlotMore, FreeBlock])
def test_a_read_of_poison_fails_the_request(recorder_type: type[Recorder]) -> None:
    assert failed(recorder_type) == [3]


def test_whatever_nobody_may_read_is_nan() -> None:
    config = resolved_config(max_num_seqs=9, max_num_batched_tokens=60, num_blocks_override=36, max_model_len=560)
    engine, recorder = recorded_engine(tiny_model(FLOAT32), config)
    drive(engine, recorder, list(mixed(neighbours(9, 3, 30, 90))))
    engine.scheduler.reset_prefix_cache()
    drive(engine, recorder, [request(20, PROMPT[:20], 1, 0.0)])  # two blocks, of which twelve slots are free
    for layer in range(3):
        assert isinstance(recorder.cache, CpuKVCache)
        for stored in (recorder.cache.keys(layer), recorder.cache.values(layer)):
            is_nan = np.isnan(stored).reshape(*stored.shape[:2], -1)
            assert (is_nan.all(-1) == is_nan.any(-1)).all()
            assert int((~is_nan.any(-1)).sum()) == 16 + 20, "of the null block and of the request's tokens"


@pytest.mark.parametrize("option", [*EDITS, *FILTERS])
def test_an_option_less_is_another_request(option: str) -> None:
    """The noise of a draw does not depend on the filters: only where many tokens compete do they change one."""
    model = tiny_model(FLOAT32)
    options = {**(EDITS if option in EDITS else FILTERS), "n": 2, "stop_token_ids": [100]}
    if option == "top_n_sigma":  # what is far below the largest logit is not typical either
        del options["typical_p"]
    del (fewer := dict(options))[option]
    temperature = 0.8 if option == "min_p" else 4.0  # the higher it is, the fewer tokens min_p leaves out
    one, other = (run(model, PROMPT, params=each, temperature=temperature) for each in (fewer, options))
    assert difference(one, other) != ""
