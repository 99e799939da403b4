"""Beam searches through the whole engine core: whatever becomes of their rows, they have their results."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from core.executors.fake import checksum, fake_candidates
from core.inputs import EngineInput, HoldClient, ReleaseClient
from core.scheduling.beams.beam_rules import BeamSearch, Candidates, sequence
from ipc.params.beam_search import num_candidates
from ipc.wire.messages import Abort, AddRequest, ErrorCode, FinishReason, Pause, PauseMode, ResetPrefixCache, Resume
from tests.columns import pack_numbers
from tests.core.driving import EOS, Driver, add_message, small_config
from tests.fake_options import fake_options, with_options
from tests.fake_tokens import fake_tokens
from tests.in_turn import in_turn

VOCAB_SIZE = 40  # so that EOS is among the candidates now and then
MAX_LEN = 60


def search(number: int, prompt: list[int], max_tokens: int, n: int, width: int, **options: Any) -> AddRequest:
    wanted = {"use_beam_search": True, "best_of": width, "n": n, "ignore_eos": False, **options}
    return add_message(number, prompt, max_tokens, **wanted)


def alone(message: AddRequest) -> list[tuple[list[int], FinishReason]]:
    """The sequences of a search without an engine."""
    params, prompt = message.params, np.frombuffer(message.prompt_token_ids, "<i4").tolist()
    assert params.best_of is not None
    assert params.max_tokens is not None
    rules = BeamSearch(params, params.best_of, min(params.max_tokens, MAX_LEN - len(prompt)), (EOS,))
    texts, count = [prompt] * params.best_of, num_candidates(params, 1)
    while True:
        candidates = []
        for text in texts:
            sums, position = np.array([checksum(np.array(text))]), np.array([len(text)], np.uint64)
            ids, values = fake_candidates(sums, position, count, VOCAB_SIZE)
            candidates.append(Candidates(ids[0], values[0]))
        chosen = rules.advance(candidates)
        if chosen is None:
            return [([token.token_id for token in sequence(one.last)], one.reason) for one in rules.results(params.n)]
        texts = [[*texts[parent], token] for parent, token in zip(chosen.parents, chosen.token_ids, strict=True)]


def driver(**options: Any) -> Driver:
    config = small_config(max_model_len=MAX_LEN, **{"num_blocks": 200, **options})
    return Driver(with_options(config, executor_options=fake_options(vocab_size=VOCAB_SIZE)))


def got(core: Driver, message: AddRequest, client: int = 0) -> list[tuple[list[int], FinishReason | None]]:
    entries = [core.inbox.received[client, message.number + choice] for choice in range(message.params.n)]
    return [(entry.tokens, entry.finish) for entry in entries]


def some_messages(seed: int, count: int) -> list[AddRequest]:
    """Two of three are searches; choice c of request n is booked as n + c."""
    rng, messages = random.Random(seed), list[AddRequest]()
    for index in range(count):
        prompt = [*range(10, 10 + rng.choice([0, 4, 8])), *(rng.randrange(3, 40) for _ in range(rng.randrange(1, 9)))]
        width = rng.choice([1, 2, 3, 4])
        if index % 3 == 2:
            messages.append(add_message(8 * index, prompt, rng.randrange(1, 20)))
            continue
        options = {
            "length_penalty": rng.choice([1.0, 0.0, -1.0, 2.0]),
            "early_stopping": rng.choice([True, False, "never"]),
            "stop_token_ids": rng.choice([None, [7, 9]]),
        }
        messages.append(search(8 * index, prompt, rng.randrange(1, 20), rng.randrange(1, width + 1), width, **options))
    return messages


def check(core: Driver, message: AddRequest, client: int = 0) -> None:
    if message.params.use_beam_search:
        assert got(core, message, client) == alone(message)
    else:
        prompt = np.frombuffer(message.prompt_token_ids, "<i4").tolist()
        expected = fake_tokens(prompt, message.params.max_tokens or 0, VOCAB_SIZE, 0)
        assert core.inbox.received[client, message.number].tokens == expected


@pytest.mark.parametrize(
    ("options", "prefix_caching", "depth"),
    in_turn(
        [
            {},
            {"num_blocks": 30, "max_num_seqs": 12},
            {"num_blocks": 28, "max_num_seqs": 12, "preemption_mode": "swap", "num_swap_blocks": 20},
            {"num_blocks": 60, "block_size": 1, "max_num_seqs": 4, "budget": 5},
            {"num_blocks": 30, "scheduling_policy": "priority", "watermark": 0.1, "max_num_seqs": 12},
            {"num_blocks": 40, "scheduling_policy": "fair", "fair_quantum": 4, "admission_lookahead": 0},
            {"num_blocks": 40, "enable_chunked_prefill": False, "reserve_full_length": True},
        ],
        [True, False],
        [1, 2],
    ),
    ids=str,
)
def test_results_are_those_of_a_search_alone(options: dict[str, Any], prefix_caching: bool, depth: int) -> None:
    core = driver(depth=depth, prefix_caching=prefix_caching, **options)
    messages = some_messages(depth, 12)
    for first in range(0, len(messages), 3):
        core.step([(0, message) for message in messages[first : first + 3]])
    core.drain(limit=20_000)
    fitting = [message for message in messages if core.inbox.received[0, message.number].failed is None]
    assert len(fitting) >= 9
    for message in fitting:
        check(core, message)
    if options.get("preemption_mode") and not prefix_caching:
        assert core.scheduler.stats.num_preemptions > 0
    again = Driver(core.config)
    for inbox, now, replies in core.log:
        assert again.engine.step(inbox, now) == replies
    assert again.executor.plans == core.executor.plans


def play(seed: int) -> int:
    """Searches and other requests with holds, aborts, pauses and resets between the steps. Returns the preemptions."""
    rng = random.Random(seed)
    core = driver(
        depth=rng.choice([1, 2]),
        num_blocks=rng.choice([30, 34, 60]),
        max_num_seqs=rng.choice([4, 6, 12]),
        budget=rng.choice([5, 9, 64]),
        prefix_caching=rng.random() < 0.5,
        scheduling_policy=rng.choice(["fcfs", "priority", "fair"]),
        fair_quantum=4,
        preemption_mode=rng.choice(["recompute", "swap"]),
        num_swap_blocks=20,
        admission_lookahead=rng.choice([0, 1, 8]),
    )
    messages, aborted, held = some_messages(seed, 12), set[int](), set[int]()
    for index, message in enumerate(messages):
        core.step([(index % 2, msgspec.structs.replace(message, priority=rng.randrange(3)))])
        for _ in range(rng.randrange(6)):
            core.step(disturbance(rng, messages[: index + 1], aborted, held))
    core.step([(client, ReleaseClient()) for client in held] + [(0, Resume(3))])
    core.drain(limit=20_000)
    for index, message in enumerate(messages):
        if message.number in aborted:
            assert all(finish is not None for _, finish in got(core, message, index % 2))
        elif core.inbox.received[index % 2, message.number].failed is None:
            check(core, message, index % 2)
    return core.scheduler.stats.num_preemptions


def disturbance(
    rng: random.Random, messages: list[AddRequest], aborted: set[int], held: set[int]
) -> list[tuple[int, EngineInput]]:
    client = rng.randrange(2)
    match rng.randrange(14):
        case 0:
            index = rng.randrange(len(messages))
            message, choices = messages[index], b""
            if rng.random() < 0.5:
                choices = np.array([rng.randrange(message.params.n)], "<u2").tobytes()
            aborted.add(message.number)
            return [(index % 2, Abort(pack_numbers([message.number]), choices))]
        case 1 if client not in held:
            held.add(client)
            return [(client, HoldClient())]
        case 2 if client in held:
            held.discard(client)
            return [(client, ReleaseClient())]
        case 3:
            return [(0, Pause(1, rng.choice([PauseMode.NEW, PauseMode.ALL])))]
        case 4 | 5:
            return [(0, Resume(2))]
        case 6:
            return [(0, ResetPrefixCache(4))]
    return []


@pytest.mark.parametrize("count", [6, pytest.param(3000, marks=[pytest.mark.soak, pytest.mark.timeout(0)])])
def test_disturbed_searches_have_their_results(count: int) -> None:
    assert sum(play(seed) for seed in range(count)) > count // 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_num_seqs": 3}, "the search has 4 beams, and max_num_seqs is 3"),
        ({"num_blocks": 12}, "beams may need"),
        (
            {"num_blocks": 30, "watermark": 0.3},
            "may need 22 KV blocks together in addition to the watermark of 9, and there",
        ),
    ],
)
def test_a_search_that_never_fits_is_refused(options: dict[str, Any], text: str) -> None:
    core = driver(**options)
    core.step([(0, search(1, [5] * 9, 20, 1, 4)), (0, add_message(9, [5], 2))])
    failed = core.inbox.received[0, 1].failed
    assert failed is not None
    assert (failed.code, text in failed.message) == (ErrorCode.INVALID_ARGUMENT, True)
    core.drain()


def test_beams_that_compute_for_many_steps_are_not_given_up_meanwhile() -> None:
    """After a hold each beam computes its tokens anew, in ten steps, and the last one starts late."""
    message = search(1, [5, 6, 7], 50, 3, 4, early_stopping="never", length_penalty=2.0)
    core = driver(budget=4, prefix_caching=False)
    core.step([(0, message)])
    for _ in range(45):
        core.step()
    assert core.inbox.received[0, 1].finish is None
    core.step([(0, HoldClient())])
    core.step([(0, ReleaseClient())])
    core.drain(limit=300)
    check(core, message)


@pytest.mark.parametrize(("num_blocks", "fits"), [(8, False), (9, True)])
def test_a_prompt_that_is_there_twice_counts_twice(num_blocks: int, fits: bool) -> None:
    """Log probabilities of a prompt are computed anew, and the other beams find it in the cache: three blocks twice."""
    core = driver(num_blocks=num_blocks + 1, block_size=16)
    core.step([(0, add_message(1, [5] * 50, 1))])
    core.drain()
    message = search(8, [5] * 50, 4, 2, 3, prompt_logprobs=0)
    core.step([(0, message)])
    core.step([(0, HoldClient())])
    core.step([(0, ReleaseClient())])
    core.drain(limit=300)
    failed = core.inbox.received[0, 8].failed
    assert (failed is None) == fits
    if fits:
        check(core, message)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({"num_blocks": 7, "block_size": 32}, 5),  # six blocks: one for each first beam, and none for the others
        ({"budget": 4}, 40),  # ten steps for each prompt, in which no other beam starts
        ({"budget": 4, "num_blocks": 100, "block_size": 1}, 40),
    ],
    ids=str,
)
def test_searches_do_not_give_way_to_one_another_for_ever(options: dict[str, Any], length: int, policy: str) -> None:
    messages = [search(8 * n, [n + 3] * length, 10, 2, 3, length_penalty=2.0) for n in range(6)]
    core = driver(prefix_caching=False, scheduling_policy=policy, max_num_seqs=24, **options)
    core.step([(0, message) for message in messages])
    core.drain(limit=600)
    for message in messages:
        check(core, message)


def test_a_deadline_fails_the_whole_search_once() -> None:
    core = driver()
    core.step([(0, search(1, [5] * 9, 20, 2, 4, deadline_ms=1))])
    core.step()
    core.step(now_ns=2_000_000)
    failed = core.inbox.received[0, 1].failed
    assert failed is not None
    assert failed.code is ErrorCode.DEADLINE_EXCEEDED
    core.drain(now_ns=2_000_000)
    assert not core.scheduler.beams


def test_a_failing_beam_fails_its_search_alone() -> None:
    """A token that some beam takes is poison: its logits are not finite from then on."""
    config = driver().config
    message = search(1, [5] * 9, 20, 2, 4)
    poison = alone(message)[0][0][3]
    core = Driver(config, poison)
    core.step([(0, message), (0, add_message(9, [6], 5))])
    core.drain()
    failed = core.inbox.received[0, 1].failed
    assert failed is not None
    assert failed.code is ErrorCode.NUMERIC
    assert core.inbox.received[0, 9].finish is not None
    assert not core.scheduler.beams


@pytest.mark.parametrize("seed", range(4))
def test_a_search_that_is_held_again_and_again_names_its_blocks_by_its_own_tokens(seed: int) -> None:
    """Its rows have other beams' tokens each time; the driver checks the names after each step."""
    rng = random.Random(seed)
    message = search(1, [rng.randrange(3, 40) for _ in range(6)], 40, 2, 3, early_stopping="never")
    core = driver(block_size=2)
    core.step([(0, message)])
    for step in range(60):
        hold: list[EngineInput] = [HoldClient(), ReleaseClient()]
        core.step([(0, one) for one in hold] if step % 5 == 4 else [])
    core.drain()
    check(core, message)
