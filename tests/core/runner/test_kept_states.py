"""Recurrent states that are kept at the ends of blocks: who begins with them, and that no bit depends on them."""

import numpy as np
import pytest

from core.models.llama import Llama
from kernels.elements import BFLOAT16
from tests.core.runner.invariance import (
    DTYPES,
    TARGET,
    difference,
    drive,
    recorded_engine,
    request,
    run,
    small_config,
    tiny_model,
)
from tests.core.runner.invariance_scenarios import PROMPT

KIND = "gated delta"


def memory(model: Llama, num_slots: int, num_rows: int) -> int:
    """Of which half has states for so many rows and slots."""
    return 2 * 4 * model.config.state_size * (num_rows + num_slots)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (0, 288),  # of 300 tokens
        (3, 288),
        (200, 288),  # the next turn of a chat
    ],
)
def test_a_prompt_begins_where_the_last_one_has_left_a_state(tail: int, expected: int) -> None:
    model, more = tiny_model(BFLOAT16, KIND), np.random.default_rng(1).integers(1, 500, tail).tolist()
    alone = run(model, PROMPT + more, prefix_caching=False)
    got = run(model, PROMPT + more, first=[request(1, PROMPT, 12, 0.0)])
    assert difference(got, alone) == ""
    assert got.num_cached_tokens == expected


def test_the_third_prompt_with_the_same_beginning_has_its_state() -> None:
    """The second one finds K and V without a state there, and leaves one."""
    model = tiny_model(BFLOAT16, KIND)
    others = [[*PROMPT[:170], *np.random.default_rng(n).integers(1, 500, 100).tolist()] for n in range(3)]
    alone = run(model, others[2], prefix_caching=False)
    first = [request(1, others[0], 2, 0.0)]
    assert run(model, others[2], first=first).num_cached_tokens == 0
    engine, recorder = recorded_engine(model, small_config(memory=memory(model, 20, 33)))
    found = []
    for number, prompt in enumerate(others, 1):
        before = engine.scheduler.stats.prefix_cache_hits
        drive(engine, recorder, [request(number, prompt, 2, 0.0)])
        found.append(engine.scheduler.stats.prefix_cache_hits - before)
    assert found == [0, 0, 160]
    assert difference(run(model, others[2], first=[request(n + 1, others[n], 2, 0.0) for n in range(2)]), alone) == ""


@pytest.mark.parametrize(("num_tokens", "expected"), [(70, 3 * 70), (300, 300 + 2 * 12)])
def test_choices_compute_a_long_prompt_once(num_tokens: int, expected: int) -> None:
    model, computed = tiny_model(BFLOAT16, KIND), 0
    engine, recorder = recorded_engine(model, small_config(memory=memory(model, 20, 33)))
    inbox = [request(TARGET, PROMPT[:num_tokens], 1, 0.9, n=3)]
    while inbox or engine.has_unfinished:
        engine.step(inbox, 0)
        decision, inbox = engine.scheduler.decision, []
        assert decision is not None
        computed += int(decision.counts.sum())
    assert computed == expected
    assert {choice for seed, choice, _ in recorder.logits if seed == TARGET} == {0, 1, 2}


@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("kind", ["short convolution", KIND, "state space"])
def test_few_slots_serve_many_beginnings(num_slots: int, kind: str) -> None:
    """Requests that share parts of their prompts, in chunks, with states that make room for each other."""
    model, rng = tiny_model(DTYPES["bfloat16"], kind), np.random.default_rng(num_slots)
    stems = [PROMPT[: int(end)] for end in rng.integers(60, 290, 4)] + [rng.integers(1, 500, 150).tolist()]
    crowd = [
        request(n, [*stems[int(rng.integers(5))], *rng.integers(1, 500, int(rng.integers(1, 80))).tolist()], 5, 0.7)
        for n in range(1, 16)
    ]
    settings = {"rows": 6, "budget": 140, "memory": memory(model, num_slots, 6), "num_blocks": 120}
    alone = run(model, PROMPT, prefix_caching=False)
    got = run(model, PROMPT, first=crowd[:8], neighbours=crowd[8:], **settings)
    assert difference(got, alone) == ""
    assert got.num_cached_tokens > 0
    for number, (_, message) in enumerate(crowd[8:], 9):
        prompt = np.frombuffer(message.prompt_token_ids, "<i4").tolist()
        engine, recorder = recorded_engine(model, small_config(prefix_caching=False))
        drive(engine, recorder, [request(number, prompt, 5, 0.7)])
        for key, logits in recorder.logits.items():
            assert np.array_equal(logits, got.recorder.logits[key]), key
