"""Recurrent states that are kept at the ends of blocks: who begins with them, and that no bit depends on them."""

from typing import Any

import msgspec
import numpy as np
import pytest

from core.batch.kept_states import KeptStates
from core.execution.plan import SavedStates
from core.models.llama import Llama
from ipc.tables.arrays import Ints
from ipc.tables.rounding import ceil_div
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
from tests.core.runner.invariance_scenarios import PROMPT, Preempting

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


def beginning(num_tokens: int, number: int, num_more: int = 100) -> list[int]:
    """A prompt with these first tokens of PROMPT, and others of its own."""
    return [*PROMPT[:num_tokens], *np.random.default_rng(number).integers(1, 500, num_more).tolist()]


def found_by(prompts: list[list[int]], num_slots: int = 20, **settings: Any) -> list[int]:
    """Cached tokens of each prompt, one after the other. No step is added for states."""
    model = tiny_model(BFLOAT16, KIND)
    config = msgspec.structs.replace(small_config(memory=memory(model, num_slots, 33)), **settings)
    engine, recorder = recorded_engine(model, config)
    found, stats = list[int](), engine.scheduler.stats
    for number, prompt in enumerate(prompts, 1):
        hits, steps = stats.prefix_cache_hits, stats.num_steps
        drive(engine, recorder, [request(number, prompt, 1, 0.0)])
        found.append(stats.prefix_cache_hits - hits)
        assert stats.num_steps - steps == ceil_div(len(prompt) - found[-1], config.max_num_batched_tokens)
    return found


def test_a_prompt_leaves_states_where_later_ones_may_leave_it() -> None:
    """The second prompt starts from the nearest such state, and leaves one where it leaves the first: at 160 tokens."""
    model, prompts = tiny_model(BFLOAT16, KIND), [beginning(170, number) for number in range(3)]
    assert found_by(prompts) == [0, 128, 160]
    for last in (1, 2):
        alone = run(model, prompts[last], prefix_caching=False)
        first = [request(number + 1, prompts[number], 2, 0.0) for number in range(last)]
        assert difference(run(model, prompts[last], first=first), alone) == ""


def test_whole_prompts_leave_states_too() -> None:
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}
    assert found_by([PROMPT * 2, beginning(300, 1), beginning(300, 2)], **whole) == [0, 256, 288]


def test_a_turn_that_does_not_repeat_the_end_of_the_last_prompt_has_a_state() -> None:
    """Chat templates end a prompt with tokens that are not in the next one."""
    assert found_by([beginning(240, 1, 20), beginning(240, 2, 50)]) == [0, 240]


def test_guesses_do_not_replace_all_other_states() -> None:
    others = [np.random.default_rng(n).integers(1, 500, 100).tolist() for n in range(3)]
    long = np.random.default_rng(9).integers(1, 500, 1500).tolist()
    found = found_by([*others, long, *others, [*long[:1300], *others[0]]], num_slots=8)
    assert found[:4] == [0] * 4
    assert found[4:7] == [96, 96, 96]
    assert 1300 - 512 <= found[7] < 1300


@pytest.mark.parametrize("plan_field", ["after", "slots"])
def test_a_wrong_state_is_noticed(plan_field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state one token late, and a state of another place, change bits."""
    model, prompts, right = tiny_model(BFLOAT16, KIND), [beginning(170, n) for n in range(2)], KeptStates.save

    def wrong(self: KeptStates, rows: Ints, counts: Ints) -> SavedStates | None:
        saved = right(self, rows, counts)
        if saved is None:
            return None
        if plan_field == "after":
            return saved._replace(after=saved.after - 1)
        return saved._replace(slots=np.roll(saved.slots, 1))

    alone = run(model, prompts[1], prefix_caching=False)
    first = [request(1, prompts[0], 2, 0.0)]
    assert difference(run(model, prompts[1], first=first), alone) == ""
    monkeypatch.setattr(KeptStates, "save", wrong)
    with pytest.raises(AssertionError):
        assert difference(run(model, prompts[1], first=first), alone) == ""


@pytest.mark.parametrize("num_cached", [0, 170])
def test_a_prompt_starts_from_blocks_on_the_host(num_cached: int) -> None:
    """Its blocks were evicted, its state was not. Another request has brought back some of the first num_cached."""
    model, more = tiny_model(BFLOAT16, KIND), [3, 5, 7] * 8
    crowd = [request(n, np.random.default_rng(n).integers(1, 500, 290).tolist(), 2, 0.0) for n in range(2, 5)]
    back = [request(9, beginning(num_cached, 9, 20), 2, 0.0)] if num_cached else []
    settings = {"rows": 1, "num_blocks": 30, "num_host_blocks": 100}
    alone = run(model, PROMPT + more, prefix_caching=False)
    got = run(model, PROMPT + more, first=[request(1, PROMPT, 2, 0.0), *crowd, *back], **settings)
    assert difference(got, alone) == ""
    assert got.recorder.scheduler.batch.host_cache.num_hits == 288 // 16  # the other has brought back 8


def aba_probes(kind: str, count: int) -> int:
    """Prompt A, others, A again with another end, preempted at random; the number of bits that differ from A alone."""
    model, num_found = tiny_model(BFLOAT16, kind), 0
    for seed in range(count):
        rng = np.random.default_rng(seed)
        cut = int(rng.integers(70, 290))
        first = [request(1, PROMPT, 2, 0.0), request(2, beginning(cut, seed), 3, 0.5)]
        again = beginning(int(rng.integers(cut - 60, cut + 1)), seed + 1, int(rng.integers(1, 60)))
        crowd = [request(n, beginning(int(rng.integers(280)), n, 40), 4, 0.7) for n in range(3, 7)]
        settings = {"rows": 4, "budget": int(rng.integers(40, 400)), "num_blocks": 70}
        settings["memory"] = memory(model, int(rng.integers(2, 24)), 4)
        if seed % 2:
            settings |= {"num_blocks": 40, "num_host_blocks": int(rng.integers(10, 60))}
        between = Preempting({int(step) for step in rng.integers(2, 12, 3)}, forgets=bool(seed % 3 == 0))
        alone = run(model, again, prefix_caching=False, max_tokens=6)
        got = run(model, again, first=first, between=between, max_tokens=6, **settings)
        assert difference(got, alone) == "", seed
        beside = run(model, again, first=first, neighbours=crowd, max_tokens=6, **settings)
        assert difference(beside, alone) == "", seed
        num_found += (got.num_cached_tokens > 0) + (beside.num_cached_tokens > 0)
    return num_found


@pytest.mark.parametrize("count", [2, pytest.param(300, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
@pytest.mark.parametrize("kind", ["short convolution", KIND, "state space"])
def test_a_prompt_has_the_same_bits_again(kind: str, count: int) -> None:
    assert aba_probes(kind, count) >= count


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
