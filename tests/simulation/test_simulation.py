"""One seed decides a whole run of engine, clients and faults (tests/simulation/simulation.py); thousands of them here.

A failure names its seed; `python -m tests.simulation SEED` replays it with a log of what happened.
"""

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from core.engine import EngineCore
from core.executors.fake_options import read_fake_options
from ipc.wire.messages import AddRequest, Outputs
from tests.core.driving import unpack
from tests.simulation.engine_parts import ready_executor
from tests.simulation.oracle import Rules, undisturbed
from tests.simulation.scenario import draw, draw_ask
from tests.simulation.simulation import simulate

SEEDS_PER_ITEM = 200
#: What every item has to come across, so that a simulator that has become tame is noticed.
KINDS = (
    *("Cut", "Slow", "StopClient", "KillClient", "StopEngine", "KillEngine", "FailStep"),
    *("HoldClient", "ReleaseClient", "abort", "frame delivered twice", "resumed request"),
    *("preemption", "prefix cache hit", "log probabilities", "accepted draft"),
    *("stored block or state", "fetched block or state"),
    *("cache copied", "gap in the events"),
    *(f"error: {text}" for text in ("deadline has passed", "send again later", "are not finite")),
    *(f"error: {text}" for text in ("did not answer again", "the engine closed the connection")),
    *(f"error: {text}" for text in ("the engine stopped", "the engine process has ended")),
)


def run_seeds(first: int, count: int) -> None:
    census: Counter[str] = Counter()
    for seed in range(first, first + count):
        census += simulate(seed).census
    assert [kind for kind in KINDS if not census[kind]] == [], census


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_four_hundred_seeds(part: int) -> None:
    run_seeds(SEEDS_PER_ITEM * part, SEEDS_PER_ITEM)


@pytest.mark.parametrize("seed", [30, 59])  # rare: one seed in sixty
def test_a_silent_engine_is_noticed(seed: int) -> None:
    assert simulate(seed).census["error: nothing arrived"]


@pytest.mark.parametrize("seed", [8, 44])  # rare: one seed in thirty
def test_blocks_are_swapped(seed: int) -> None:
    assert simulate(seed).census["swapped block"]


@pytest.mark.soak
@pytest.mark.parametrize("part", range(30))
def test_sixty_thousand_seeds(part: int) -> None:
    run_seeds(SEEDS_PER_ITEM * 2 + 2000 * part, 2000)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 10))])
def test_a_seed_decides_everything(seed: int) -> None:
    first, second = simulate(seed, verbose=True), simulate(seed, verbose=True)
    assert first.log == second.log
    assert (first.now_ns, first.census) == (second.now_ns, second.census)


def test_the_oracle_is_a_request_alone_on_a_fresh_engine() -> None:
    rng = random.Random(1)
    for seed in range(60):
        config = msgspec.structs.replace(draw(seed).config, kv_dir=None)  # no store would answer
        fake = read_fake_options(config)
        rules = Rules(fake.vocab_size, fake.eos_token_id, config.max_model_len, None)
        ask = draw_ask(rng, config, [[1, 2, 3]], has_logprobs=False)
        engine = EngineCore(config, ready_executor(config))
        prompt = b"".join(token.to_bytes(4, "little") for token in ask.prompt)
        inbox: list[Any] = [(1, AddRequest(1, prompt, ask.params, ask.seed))]
        found: list[tuple[list[int], int]] = [([], 0) for _ in range(ask.params.n)]
        if max(ask.prompt) >= rules.vocab_size:
            continue
        while inbox or engine.has_work:
            for _, message in engine.step(inbox, 0):
                assert isinstance(message, Outputs)
                choices = message.choices or bytes(2 * len(message.numbers))
                for row, (_, position, new, finish) in enumerate(unpack(message)):
                    tokens, _ = found[choices[2 * row]]
                    assert position == len(tokens)
                    found[choices[2 * row]] = ([*tokens, *new], finish)
            inbox = []
        assert found == [undisturbed(ask, choice, rules)[:2] for choice in range(ask.params.n)]
