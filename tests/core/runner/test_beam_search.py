"""Beam search with a model: transformers' sequences and scores, and the same bits in any company."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest
from tests.core.runner.beam_runs import MAX_TOKENS, message, reference, run

VOCAB_SIZE = 60
EOS = (2, 7)
PROMPTS = [np.random.default_rng(0).integers(8, VOCAB_SIZE, length).tolist() for length in (5, 17, 33)]

#: beams, length_penalty, early_stopping, repetition_penalty, stop_token_ids
EVERY = list(itertools.product((2, 4, 8), (-1.0, 0.0, 1.0, 2.0), (True, False, "never"), (1.0, 1.3), ((), (11,))))


def check(folder: Path, cases: list[Any]) -> None:
    """All cases run in one engine at once; each equals transformers' search alone."""
    torch, model = pytest.importorskip("torch"), reference(folder, VOCAB_SIZE, EOS)
    runs = [(case, prompt) for case in cases for prompt in PROMPTS]
    messages = [
        message(
            number,
            prompt,
            beams,
            length_penalty=penalty,
            early_stopping=early,
            repetition_penalty=repetition,
            stop_token_ids=list(stops),
        )
        for number, ((beams, penalty, early, repetition, stops), prompt) in enumerate(runs)
    ]
    found, _ = run(folder, messages)
    for number, ((beams, penalty, early, repetition, stops), prompt) in enumerate(runs):
        options = {} if repetition == 1 else {"repetition_penalty": repetition}
        with torch.no_grad():
            wanted = model.generate(
                torch.tensor([prompt]),
                num_beams=beams,
                num_return_sequences=beams,
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                length_penalty=penalty,
                early_stopping=early,
                eos_token_id=[*EOS, *stops],
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
        for choice in range(beams):
            tokens, values = found[number, choice].tokens, found[number, choice].values
            sequence = wanted.sequences[choice, len(prompt) :].tolist()
            assert sequence[: len(tokens)] == tokens, (runs[number], choice)
            assert set(sequence[len(tokens) :]) <= {EOS[0]}  # what transformers fills up with
            score = sum(values) / len(tokens) ** penalty
            assert abs(score - wanted.sequences_scores[choice].item()) < 1e-4 * max(1, abs(score))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("beams")
    reference(made, VOCAB_SIZE, EOS)
    return made


def test_sequences_and_scores_are_those_of_transformers(folder: Path) -> None:
    check(folder, EVERY[::29])


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak_sequences_and_scores_are_those_of_transformers(folder: Path) -> None:
    check(folder, EVERY)


def test_one_beam_is_greedy_decoding(folder: Path) -> None:
    prompt = np.array(PROMPTS[1], "<i4").tobytes()
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0)
    found, _ = run(folder, [message(0, PROMPTS[1], 1), AddRequest(1, prompt, greedy, 1)])
    assert found[0, 0].tokens == found[1, 0].tokens
    assert np.allclose(found[0, 0].values, found[1, 0].values, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_caching": False},
        {"num_blocks": 75, "preemption_mode": "recompute"},
        {"num_blocks": 75, "preemption_mode": "swap", "prefix_caching": False},
        {"depth": 2, "block_size": 1, "num_blocks": 3600},
        {"budget": 24, "max_num_seqs": 20},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_the_company(folder: Path, options: dict[str, Any]) -> None:
    """Equal log probabilities, bit for bit, alone and beside other searches that take the blocks."""
    messages = [
        message(n, PROMPTS[n % 3], 4 + n % 3, repetition_penalty=1.2, bad_words_token_ids=[[9, 10]]) for n in range(6)
    ]
    alone = [run(folder, [one])[0] for one in messages]
    together, core = run(folder, messages, **options)
    for one in alone:
        for key, sequence in one.items():
            assert (together[key].tokens, together[key].values) == (sequence.tokens, sequence.values)
    assert (core.scheduler.stats.num_preemptions > 0) == (options.get("num_blocks") == 75)


def test_a_temperature_divides_logits(folder: Path) -> None:
    hot, _ = run(folder, [message(0, PROMPTS[0], 4)])
    params = SamplingParams(use_beam_search=True, n=4, temperature=3.0, max_tokens=MAX_TOKENS, logprobs=0)
    other, _ = run(folder, [AddRequest(0, np.array(PROMPTS[0], "<i4").tobytes(), params, 0)])
    assert [one.values for one in other.values()] != [one.values for one in hot.values()]
    assert all(value <= 0 for one in other.values() for value in one.values)


def test_logprobs_are_those_of_the_likeliest_candidates(folder: Path) -> None:
    """More of them change no sequence; the likeliest one is each position's greedy token."""
    plain, _ = run(folder, [message(0, PROMPTS[1], 4)])
    several, _ = run(folder, [message(0, PROMPTS[1], 4, logprobs=30)])
    for key, one in plain.items():
        assert (several[key].tokens, several[key].values) == (one.tokens, one.values)
        for place, (position, found) in enumerate(sorted(several[key].logprobs.items())):
            assert position == len(PROMPTS[1]) + place
            assert found.token_ids[0] == one.tokens[place] == found.token_ids[found.rank]
            assert len(found.token_ids) == 31
            assert (np.diff(found.values[1:]) <= 0).all()
    greedy = SamplingParams(temperature=0, max_tokens=1, logprobs=30)
    (alone,) = run(folder, [AddRequest(0, np.array(PROMPTS[1], "<i4").tobytes(), greedy, 0)])[0].values()
    first = several[0, 0].logprobs[len(PROMPTS[1])]
    assert first.token_ids[1:].tolist() == alone.logprobs[len(PROMPTS[1])].token_ids[1:].tolist()
    assert np.allclose(first.values[1:], alone.logprobs[len(PROMPTS[1])].values[1:], atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"budget": 8}, {"num_blocks": 60, "prefix_caching": False}], ids=str)
def test_a_prompts_log_probabilities_come_with_the_best_sequence(folder: Path, options: dict[str, Any]) -> None:
    prompt = np.array(PROMPTS[1], "<i4").tobytes()
    plain = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, logprobs=0)
    (alone,) = run(folder, [AddRequest(0, prompt, plain, 0)])[0].values()
    searches = [message(n, PROMPTS[1], 4, prompt_logprobs=2) for n in range(3)]
    found, _ = run(folder, searches, **options)
    for (_, choice), one in found.items():
        told = {position: told for position, told in one.logprobs.items() if position < len(PROMPTS[1])}
        assert sorted(told) == (list(range(1, len(PROMPTS[1]))) if choice == 0 else [])
        for position, each in told.items():
            wanted = alone.logprobs[position]
            assert each.token_ids.tolist() == wanted.token_ids.tolist()
            assert each.values.tolist() == wanted.values.tolist()
