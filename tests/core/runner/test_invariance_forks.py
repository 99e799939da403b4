"""Forks at numerics level L2: each choice has the bits that it has where it computes the prompt itself."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from core.engine import EngineCore
from core.inputs import EngineInput
from ipc.wire.messages import Abort
from kernels.elements import BFLOAT16
from tests.columns import pack_numbers
from tests.core.hostile_drafts import speculative
from tests.core.runner.invariance import TARGET, TARGET_CLIENT, Recorder, Run, bits, neighbours, run, tiny_model

PROMPT = list(range(1, 60))
NUM_CHOICES = 3
PARAMS = {
    "n": NUM_CHOICES,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "repetition_penalty": 1.2,
    "bad_words_token_ids": [[7, 8]],
    "min_tokens": 3,
}


def target(**options: Any) -> Run:
    return run(tiny_model(BFLOAT16), PROMPT, params=PARAMS, **options)


@lru_cache
def alone(choice: int) -> Run:
    """The choice computes the prompt: all others are aborted after the first chunk."""
    others = [other for other in range(NUM_CHOICES) if other != choice]

    def between(engine: EngineCore, recorder: Recorder) -> list[tuple[int, EngineInput]]:
        numbers = pack_numbers([TARGET] * len(others))
        return (
            []
            if engine.scheduler.stats.num_steps > 1
            else [(TARGET_CLIENT, Abort(numbers, np.array(others, "<u2").tobytes()))]
        )

    return target(between=between, budget=20)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("crowd", "options"),
    [
        (0, {}),
        (0, {"prefix_caching": False}),
        (4, {"prefix_caching": False, "budget": 7, "num_blocks": 800}),
        (5, {"prefix_caching": False, "num_blocks": 14}),
        (0, {"prefix_caching": False, "speculative": speculative()}),
    ],
    ids=str,
)
def test_bits_are_those_of_a_choice_that_computes_its_prompt(crowd: int, options: dict[str, Any], depth: int) -> None:
    got = target(neighbours=neighbours(crowd, 3, 30, 40), depth=depth, **options)
    for choice in range(NUM_CHOICES):
        wanted = alone(choice)
        assert got.tokens[choice] == wanted.tokens[choice]
        assert np.array_equal(bits(got.logits[choice]), bits(wanted.logits[choice]))
        assert np.array_equal(bits(got.edited[choice]), bits(wanted.edited[choice]))
        assert len(got.logprobs[choice].output) == len(got.tokens[choice])
    assert len(got.logprobs[0].prompt) == len(PROMPT) - 1
    assert len({tuple(tokens) for tokens in got.tokens.values()}) == NUM_CHOICES
    assert (got.recorder.scheduler.stats.num_preemptions > 0) == (options.get("num_blocks") == 14)
