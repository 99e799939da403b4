"""Drafts change no bit: logits, tokens, ends and log probabilities are those without, on every variant of the kernels,
with proposers that are always right, always wrong, random, or propose too much.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest

from core.batch.table import BatchTable
from core.engine import EngineCore
from core.models.llama import Llama
from ipc.wire.messages import AddRequest
from kernels.cpu.build import usable_variants
from kernels.cpu.library import load_cpu_library
from kernels.elements import BFLOAT16, FLOAT32
from tests.core.hostile_drafts import KINDS, Hostile, speculative, use
from tests.core.runner.invariance import (
    DTYPES,
    TARGET,
    Heard,
    Recorder,
    bits,
    difference,
    drive,
    neighbours,
    recorded_engine,
    run,
    small_config,
    state_memory,
    tiny_model,
)
from tests.core.runner.invariance import (
    KINDS as MODELS,
)
from tests.core.runner.invariance_scenarios import EDITS, FILTERS, PROMPT, SCENARIOS, Preempting, mixed, scenario
from tests.in_turn import in_turn
from tests.placed import PREFIX

Streams = dict[tuple[int, int], list[int]]  # by number and choice
VARIANTS = usable_variants()
RECURRENT = [kind for kind, config in MODELS.items() if config.state_size]


def next_tokens(streams: Streams, table: BatchTable, row: int, count: int) -> list[int]:
    first = int(table.num_tokens[row] - table.num_prompt_tokens[row])
    return streams.get((int(table.number[row]), int(table.choice[row])), [])[first : first + count]


def hostile(engine: EngineCore, kind: str, streams: Streams) -> Hostile:
    return use(engine.scheduler, kind, lambda table: partial(next_tokens, streams, table), MODELS["plain"].vocab_size)


def crowd(count: int, seed: int) -> list[tuple[int, AddRequest]]:
    return mixed(neighbours(count, seed, 60, 40))


def heard(model: Llama, kind: str | None, streams: Streams, seed: int, **settings: Any) -> tuple[Heard, Recorder, int]:
    """(what the clients of 10 requests with all kinds of options got, the runner, accepted drafts)."""
    settings = {**state_memory(model), **settings}
    engine, recorder = recorded_engine(model, small_config(speculative=speculative(6) if kind else None, **settings))
    if kind:
        hostile(engine, kind, streams)
    return drive(engine, recorder, list(crowd(10, seed))), recorder, engine.scheduler.stats.num_accepted_tokens


def compare(model: Llama, seed: int, **settings: Any) -> int:
    """Run a crowd with each hostile proposer; return the number of tokens that were compared."""
    plain, recorder, _ = heard(model, None, {}, seed, **settings)
    num_tokens = 0
    for kind in KINDS:
        got, other, num_accepted = heard(model, kind, plain.tokens, seed, **settings)
        assert got.tokens == plain.tokens, kind
        assert got.finish == plain.finish, kind
        assert (num_accepted > 0) == (kind != "wrong")
        for key, logits in recorder.logits.items():
            assert np.array_equal(bits(other.logits[key]), bits(logits)), (kind, key)
        num_tokens += sum(len(tokens) for tokens in got.tokens.values())
    return num_tokens


@pytest.mark.parametrize(("variant", "dtype"), in_turn(VARIANTS, DTYPES))
def test_no_bit_differs(dtype: str, variant: str) -> None:
    model = tiny_model(DTYPES[dtype], "local and global", variant)
    blocks = {"float32": 400, "bfloat16": 40}[dtype]  # with 40 among preemptions
    assert compare(model, 3, budget=100, num_blocks=blocks) > 700
    load_cpu_library(variant).stop_threads()


@pytest.mark.parametrize(("kind", "num_drafts"), in_turn(RECURRENT, [6, 32]))
def test_recurrent_states_go_back_to_the_last_right_draft(kind: str, num_drafts: int) -> None:
    """Half of the memory has eight states for each draft that a step may have."""
    model = tiny_model(BFLOAT16, kind)
    memory = 16 * 4 * model.config.state_size * num_drafts
    assert compare(model, num_drafts, budget=100, num_blocks=40 if num_drafts == 32 else 400, memory=memory) > 700


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("variant", VARIANTS)
def test_soak_100_000_tokens_and_no_bit_differs(variant: str) -> None:
    num_tokens, seed = 0, 100
    while num_tokens < 100_000:
        dtype, kind = list(DTYPES.values())[seed % 2], list(MODELS)[seed % len(MODELS)]
        blocks = (400, 40, 60)[seed % 3]
        num_tokens += compare(tiny_model(dtype, kind, variant), seed, budget=100 + seed % 150, num_blocks=blocks)
        seed += 1
    load_cpu_library(variant).stop_threads()


@pytest.mark.parametrize("kind", ["random", "long"])
def test_scenarios_of_one_request(kind: str) -> None:
    """The target has every option that edits logits, three choices and log probabilities."""
    model = tiny_model(FLOAT32, "sliding window")
    params: dict[str, Any] = {**EDITS, "min_tokens": 4, "n": 3, "logprobs": 4, "stop_token_ids": [100, 200]}
    target: dict[str, Any] = {"params": params, "max_tokens": 20}
    alone = run(model, PROMPT, **target)
    streams = {(TARGET, choice): tokens for choice, tokens in alone.tokens.items()}
    drafting = {"begin": partial(hostile, kind=kind, streams=streams), "speculative": speculative()}
    assert difference(run(model, PROMPT, **target, **drafting), alone) == ""
    for name in SCENARIOS:
        assert difference(scenario(name, model, **target, **drafting), alone) == "", name


def test_preempted_after_any_one_step() -> None:
    """With swapping off: what drafts had computed is gone, and computed again."""
    model = tiny_model(BFLOAT16, "local and global")
    params: dict[str, Any] = {**FILTERS, "logprobs": 2, "prompt_logprobs": 1}
    target: dict[str, Any] = {"params": params, "max_tokens": 30}
    alone = run(model, PROMPT[:150], **target)
    streams = {(TARGET, choice): tokens for choice, tokens in alone.tokens.items()}
    drafting = {"begin": partial(hostile, kind="random", streams=streams), "speculative": speculative(3)}
    for step in range(1, 8):
        preempting = Preempting({step}, forgets=step % 2 == 0)
        got = run(model, PROMPT[:150], budget=64, num_blocks=40, between=preempting, **target, **drafting)
        assert got.num_preemptions == 1
        assert difference(got, alone) == "", f"preempted at (computed, output) {preempting.seen}"


def test_a_wrong_acceptance_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that takes every draft as right gives other streams."""
    model = tiny_model(FLOAT32)
    plain, _, _ = heard(model, None, {}, 5)
    monkeypatch.setattr(
        f"{PREFIX}core.runner.model_runner.accepted", lambda rows, offsets, sampled, table: offsets >= 0
    )
    try:
        got, _, _ = heard(model, "random", plain.tokens, 5)
    except AssertionError:
        return  # the recorder has seen other logits
    assert got.tokens != plain.tokens
