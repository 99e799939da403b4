"""Numerics level L2 through engine, scheduler and runner: a request's logits and tokens are its own, bit for bit."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.executors.local import LocalExecutor
from core.model_files.model_config import read_model_config
from core.model_files.tensors.weights import load_weights
from core.models.llama import Llama
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig
from ipc.tables.arrays import Int32s, Ints
from ipc.wire.messages import Outputs, RequestFailed
from kernels.cpu.library import load_cpu_library
from kernels.elements import BFLOAT16, FLOAT32
from tests.core.runner.invariance import (
    DTYPES,
    Heard,
    Recorder,
    bits,
    difference,
    drive,
    neighbours,
    recorded_engine,
    request,
    run,
    tiny_model,
)
from tests.core.runner.invariance_kinds import EVERY_KIND
from tests.core.runner.invariance_scenarios import ONE_OF_EACH, PROMPT, SCENARIOS, mixed, scenario
from tests.resolved import resolved_config


@pytest.mark.parametrize(("dtype", "kind"), EVERY_KIND)
def test_a_request_alone_and_in_any_company_has_the_same_logits(dtype: str, kind: str) -> None:
    model = tiny_model(DTYPES[dtype], kind)
    assert model.numerics == "L2"
    alone = run(model, PROMPT)
    assert len(alone.tokens[0]) == 16
    for name in SCENARIOS if kind == "plain" else ONE_OF_EACH:
        assert difference(scenario(name, model, mixes=kind == "plain"), alone) == "", name


def test_two_threads_give_the_bits_of_one() -> None:
    model, library = tiny_model(BFLOAT16), load_cpu_library()
    alone = run(model, PROMPT)
    library.start_threads(2)
    try:
        two = run(model, PROMPT, neighbours=neighbours(8, 4, 80, 20))
    finally:
        library.start_threads(1)
    assert difference(two, alone) == ""


def test_the_demo_model_in_bfloat16() -> None:
    path = resolve_model(None)
    config = read_model_config(path)
    model = Llama(config, load_weights(path, config, BFLOAT16), BFLOAT16, library=load_cpu_library())
    prompt = PROMPT[:70]
    alone = run(model, prompt, max_tokens=6)
    crowd = run(model, prompt, max_tokens=6, neighbours=neighbours(8, 1, 40, 8), budget=100)
    assert difference(crowd, alone) == ""
    assert difference(run(model, prompt, max_tokens=6, budget=19), alone) == ""
    squeezed = run(model, prompt, max_tokens=6, neighbours=neighbours(4, 2, 16, 20), num_blocks=10, policy="priority")
    assert squeezed.num_preemptions > 0
    assert difference(squeezed, alone) == ""
    again = run(model, prompt, max_tokens=6, first=[request(1, prompt, 2, 0.0)])
    assert again.num_cached_tokens == 64
    assert difference(again, alone) == ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pool_too_small_changes_no_logits_of_anybody(dtype: str) -> None:
    """All requests, not one: the pool holds a fifth of what runs."""
    requests = mixed(neighbours(16, 9, 20, 100))  # short prompts, long outputs: all start, few can stay
    model = tiny_model(DTYPES[dtype])

    def heard(num_blocks: int) -> tuple[Heard, Recorder, int]:
        config = resolved_config(
            max_num_seqs=16, max_num_batched_tokens=128, num_blocks_override=num_blocks, max_model_len=190
        )
        engine, recorder = recorded_engine(model, config)
        return drive(engine, recorder, list(requests)), recorder, engine.scheduler.stats.num_preemptions

    unhurried, expected, none = heard(400)
    squeezed, got, some = heard(20)
    assert none == 0
    assert some > 10, f"{some} preemptions"
    assert (squeezed.tokens, squeezed.finish) == (unhurried.tokens, unhurried.finish)
    for kept, other in ((got.logits, expected.logits), (got.edited, expected.edited)):
        assert kept.keys() == other.keys()
        assert [key for key in kept if not np.array_equal(bits(kept[key]), bits(other[key]))] == []


def test_nan_logits_fail_one_request_alone() -> None:
    config = resolved_config(max_num_seqs=4, max_num_batched_tokens=64, num_blocks_override=50, max_model_len=200)

    class Poisoned(Recorder):
        def sample(self, rows: Ints, result: Any, offsets: Ints | None = None) -> Int32s:
            poisoned = result.logits.copy()
            poisoned[self.sampling.seed[rows] == 2] = np.nan
            return super().sample(rows, SimpleNamespace(logits=poisoned, largest=None), offsets)

    engine, recorder = recorded_engine(tiny_model(FLOAT32), config, Poisoned)
    messages = engine.step([request(1, [5, 6, 7], 4, 0.0), request(2, [8, 9], 4, 0.0)], 0)
    failed = [message for _, message in messages if isinstance(message, RequestFailed)]
    assert [message.number for message in failed] == [2]
    assert "not finite" in failed[0].message
    alone = drive(*recorded_engine(tiny_model(FLOAT32), config), [request(1, [5, 6, 7], 4, 0.0)])
    first = np.frombuffer(next(m for _, m in messages if isinstance(m, Outputs)).tokens, "<i4").tolist()
    assert first + drive(engine, recorder, []).tokens[1, 0] == alone.tokens[1, 0]


def test_the_local_executor_says_what_it_runs() -> None:
    executor = LocalExecutor(EngineConfig(dtype="bfloat16", threads=1))
    assert executor.info.numerics == "L2"
    assert executor.info.vocab_size == 49_152
    per_block = 2 * 30 * 16 * 3 * 64 * 2  # K and V, layers, tokens, KV heads, head size, bytes
    assert executor.determine_num_available_blocks(100 * per_block + 5, 16) == 100
