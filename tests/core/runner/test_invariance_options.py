"""The options of a request follow it: through neighbours with and without options, chunks, preemption and the prefix
cache its logits, as the sampler gets them and as its edits leave them, its tokens, ends and log probabilities stay.
"""

from typing import Any

import numpy as np
import pytest

from core.models.llama import Llama
from ipc.wire.messages import FinishReason
from tests.core.runner.invariance import DTYPES, Run, difference, run, tiny_model
from tests.core.runner.invariance_scenarios import EDITS, FILTERS, PROMPT, Preempting, scenario

#: Each kind and each dtype; the other pairs are the soak's.
MODELS = [
    ("float32", "plain"),
    ("bfloat16", "sliding window"),
    ("bfloat16", "local and global"),
    *(pytest.param(*pair, marks=pytest.mark.soak) for pair in (("bfloat16", "plain"), ("float32", "sliding window"))),
    pytest.param("float32", "local and global", marks=pytest.mark.soak),
]

#: One of each group of scenarios; how finely a prompt is cut is nothing to the sampler.
SCENARIOS = ("among 32", "chunks of 37", "preempted", "from the prefix cache")


def watched(model: Llama, options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    """(arguments of run(), the run alone) of a target that is stopped by its choice 0's first new token after six."""
    free = run(model, PROMPT, params={**options, "min_tokens": 0}, max_tokens=20, temperature=2.0).tokens[0]
    stop = next(token for token in free[6:] if token not in free[:6])
    target = {"params": {**options, "stop_token_ids": [stop]}, "max_tokens": 20, "temperature": 2.0}
    return target, run(model, PROMPT, **target)


@pytest.mark.parametrize(("dtype", "kind"), MODELS)
def test_edits_of_three_choices(dtype: str, kind: str) -> None:
    model = tiny_model(DTYPES[dtype], kind=kind)
    target, alone = watched(model, {**EDITS, "min_tokens": 4, "n": 3, "logprobs": 4})
    assert len({tuple(tokens) for tokens in alone.tokens.values()}) == 3
    assert all(len(alone.logprobs[choice].output) == len(alone.tokens[choice]) for choice in range(3))
    stop = target["params"]["stop_token_ids"][0]
    assert np.isinf(alone.edited[0][:4, stop]).all(), "min_tokens was not in force"
    assert not np.isinf(alone.edited[0][4:, stop]).any()
    assert (alone.edited[0] != alone.logits[0]).sum(-1).min() > 100, "a row has few edits"
    for name in SCENARIOS:
        assert difference(scenario(name, model, **target), alone) == "", name


@pytest.mark.parametrize(("dtype", "kind"), MODELS)
def test_filters_of_two_choices_and_log_probabilities_of_the_prompt(dtype: str, kind: str) -> None:
    model = tiny_model(DTYPES[dtype], kind=kind)
    target, alone = watched(model, {**FILTERS, "n": 2, "logprobs": 0, "prompt_logprobs": 3})
    assert alone.finish[0] == FinishReason.STOP
    assert {token for tokens in alone.tokens.values() for token in tokens} <= set(FILTERS["allowed_token_ids"])
    assert len(alone.logprobs[0].prompt) == len(PROMPT) - 1
    for name in SCENARIOS:
        assert difference(scenario(name, model, reads_cache=False, **target), alone) == "", name


@pytest.mark.parametrize(("dtype", "kind"), MODELS)
def test_edits_and_log_probabilities_preempted_after_any_one_step(dtype: str, kind: str) -> None:
    """Counts and bad words are found again in the tokens so far; the prompt's log probabilities are told once."""
    model = tiny_model(DTYPES[dtype], kind=kind)
    params = {**EDITS, "min_tokens": 4, "stop_token_ids": [100], "logprobs": 2, "prompt_logprobs": 1}
    target: dict[str, Any] = {"params": params, "max_tokens": 10}
    alone = run(model, PROMPT[:150], **target)
    assert (len(alone.logprobs[0].prompt), len(alone.logprobs[0].output)) == (149, len(alone.tokens[0]))
    for step in range(1, 4 + 6):  # chunks and tokens
        preempting = Preempting({step}, forgets=step % 2 == 0)
        got = run(model, PROMPT[:150], budget=48, num_blocks=40, between=preempting, **target)
        assert got.num_preemptions == 1
        assert difference(got, alone) == "", f"preempted at (computed, output) {preempting.seen}"
