"""Beam search in a grammar: transformers' sequences where there are enough of them, else all that there are."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc.params.sampling_params import SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.wire.messages import AddRequest, FinishReason
from tests.core.runner.beam_runs import MAX_TOKENS, Heard, message, reference, run
from tests.grammar_vocabulary import EOS, VOCAB_SIZE, allowed, make_grammars, schema, structured, text_of

GRAMMARS = make_grammars()
KINDS = [
    structured(regex="[a-e]{3,9}(00)?"),
    structured(json=schema(age={"type": "integer", "minimum": 0, "maximum": 99}), disable_any_whitespace=True),
    structured(grammar='root ::= "<" [a-z]{2,15} ">"'),
]
PROMPTS = [np.random.default_rng(1).integers(0, 250, length).tolist() for length in (4, 19)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("beam-grammars")
    reference(made, VOCAB_SIZE, (EOS,))
    return made


def their_search(
    folder: Path, prompt: list[int], constraint: StructuredOutputsParams, **options: Any
) -> list[tuple[list[int], float]]:
    """Transformers' sequences and scores; what is allowed is read off a matcher of llguidance that is new each time."""
    torch, model = pytest.importorskip("torch"), reference(folder, VOCAB_SIZE, (EOS,))

    def allow(_: int, ids: Any) -> list[int]:
        output = ids[len(prompt) :].tolist()
        matcher, mask = GRAMMARS.matcher(constraint), np.zeros(GRAMMARS.num_words, np.uint32)
        if output and not matcher.consume_tokens(output):
            return [EOS]  # behind a sequence whose score is minus infinity already
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return allowed(mask) or [EOS]

    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=[EOS],
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            prefix_allowed_tokens_fn=allow,
            **options,
        )
    rows = [row.tolist() for row in found.sequences[:, len(prompt) :]]
    cut = [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]
    return list(zip(cut, found.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_sequences_and_scores_are_those_of_transformers(folder: Path, kind: int) -> None:
    constraint = KINDS[kind]
    cases = list(itertools.product(PROMPTS, (2, 4), ((1.0, False), (0.0, True), (2.0, "never"))))
    searches = [
        message(number, prompt, beams, structured_outputs=constraint, length_penalty=penalty, early_stopping=early)
        for number, (prompt, beams, (penalty, early)) in enumerate(cases)
    ]
    found, _ = run(folder, searches, GRAMMARS)
    for number, (prompt, beams, (penalty, early)) in enumerate(cases):
        options = {"length_penalty": penalty, "early_stopping": early}
        theirs = their_search(folder, prompt, constraint, num_beams=beams, num_return_sequences=beams, **options)
        for choice, (tokens, score) in enumerate(theirs):
            one = found[number, choice]
            assert one.tokens == tokens, (cases[number], choice)
            assert math.isclose(sum(one.values) / len(tokens) ** penalty, score, rel_tol=1e-4, abs_tol=1e-4)


def whole(folder: Path, prompt: list[int], tokens: list[int]) -> float:
    """The sum of the log probabilities of the tokens after the prompt, without a search."""
    ids = np.array([*prompt, *tokens], "<i4").tobytes()
    (one,) = run(folder, [AddRequest(0, ids, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), 0)])[
        0
    ].values()
    return sum(float(one.logprobs[len(prompt) + place].values[0]) for place in range(len(tokens)))


@pytest.mark.parametrize("early", [True, False, "never"])
def test_where_there_are_fewer_sequences_than_beams_all_are_found(folder: Path, early: bool | str) -> None:
    """Each character here is one token, so that there are three sequences."""
    texts = ["x", "yz", "ab"]
    search = message(0, PROMPTS[1], 5, structured_outputs=structured(choice=texts), early_stopping=early)
    found, _ = run(folder, [search], GRAMMARS)
    real = [found[0, choice] for choice in range(3)]
    assert {text_of(one.tokens) for one in real} == set(texts)
    assert all(one.finish is FinishReason.STOP for one in real)
    scores = [sum(one.values) / len(one.tokens) for one in real]
    assert scores == sorted(scores, reverse=True)
    for one in real:
        assert math.isclose(sum(one.values), whole(folder, PROMPTS[1], one.tokens), rel_tol=1e-4)
    for choice in (3, 4):  # there are no more, and the client is told
        assert (found[0, choice].tokens, found[0, choice].finish) == ([], FinishReason.ABORT)


@pytest.mark.parametrize(
    "options", [{"num_blocks": 50, "preemption_mode": "recompute"}, {"prefix_caching": False, "budget": 24}], ids=str
)
def test_bits_do_not_depend_on_the_company(folder: Path, options: dict[str, Any]) -> None:
    kinds = [*KINDS, None]
    searches = [
        message(n, PROMPTS[n % 2], 3 + n % 2, structured_outputs=kinds[n % 4], repetition_penalty=1.2) for n in range(8)
    ]
    alone: dict[tuple[int, int], Heard] = {}
    for one in searches:
        alone |= run(folder, [one], GRAMMARS)[0]
    together, core = run(folder, searches, GRAMMARS, **options)
    assert {key: (one.tokens, one.values) for key, one in together.items()} == {
        key: (one.tokens, one.values) for key, one in alone.items()
    }
    assert (core.scheduler.stats.num_preemptions > 0) == ("preemption_mode" in options)


def test_options_that_leave_no_token_fail_the_search_alone(folder: Path) -> None:
    searches = [message(0, PROMPTS[0], 3, structured_outputs=structured(choice=["x"]), min_tokens=5)]
    with pytest.raises(AssertionError, match="structured_outputs allow no token here"):
        run(folder, searches, GRAMMARS)
