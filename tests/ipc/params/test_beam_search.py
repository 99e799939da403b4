"""The parameters of a beam search: what goes together, and what is refused by name."""

from typing import Any

import pytest

from ipc.errors import InvalidRequestError
from ipc.params.beam_search import MAX_BEAMS, MAX_LENGTH_PENALTY, num_candidates, num_rows
from ipc.params.sampling_params import SamplingParams


def make(**options: Any) -> SamplingParams:
    return SamplingParams(**{"use_beam_search": True, "temperature": 0, **options})


def test_beams_are_best_of_or_n() -> None:
    assert num_rows(make(n=3)) == 3
    assert num_rows(make(n=2, best_of=5)) == 5
    assert num_rows(SamplingParams(n=4)) == num_rows(SamplingParams(n=4, best_of=1)) == 4
    assert SamplingParams(n=4, best_of=4) == SamplingParams(n=4)
    assert make(length_penalty=2).length_penalty == 2.0
    assert make(early_stopping="never").early_stopping == "never"


def test_candidates_suffice_where_all_beams_end() -> None:
    assert num_candidates(make(n=4), 1) == 5
    assert num_candidates(make(n=4, ignore_eos=True), 3) == 4
    assert num_candidates(make(n=4, stop_token_ids=[7]), 2) == 7
    assert num_candidates(make(n=4, logprobs=3), 1) == 5
    assert num_candidates(make(n=4, logprobs=20), 1) == 20


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n": 3, "best_of": 2}, r"best_of \(the number of beams\) must be in \[n=3, 64\], got 2"),
        ({"best_of": MAX_BEAMS + 1}, r"best_of \(the number of beams\)"),
        ({"n": MAX_BEAMS + 1}, "n of a beam search is at most 64, got 65"),
        ({"best_of": 2.0}, r"best_of \(the number of beams\)"),
        ({"best_of": True}, r"best_of \(the number of beams\)"),
        ({"length_penalty": MAX_LENGTH_PENALTY + 1}, "length_penalty must be a number in"),
        ({"length_penalty": float("nan")}, "length_penalty must be a number in"),
        ({"length_penalty": "1"}, "length_penalty must be a number in"),
        ({"early_stopping": "always"}, 'early_stopping must be True, False or "never"'),
        ({"early_stopping": 1}, 'early_stopping must be True, False or "never"'),
        ({"top_p": 0.9}, "top_p=0.9 and use_beam_search cannot be combined: a beam search draws nothing"),
        ({"top_k": 5}, "top_k=5 and use_beam_search"),
        ({"min_p": 0.1}, "min_p=0.1 and use_beam_search"),
        ({"stop": ["x"]}, "use stop_token_ids"),
        ({"logprobs": -1}, "logprobs=-1 and use_beam_search cannot be combined: each beam would keep"),
        ({"max_tokens": 65_536}, "max_tokens of a beam search is at most 65535"),
        ({"use_beam_search": 1}, "use_beam_search must be True or False"),
        (
            {"use_beam_search": False, "best_of": 3},
            "best_of=3 is the number of beams, for use_beam_search; without one, sample n",
        ),
        ({"use_beam_search": False, "length_penalty": 0.5}, "length_penalty=0.5 is for use_beam_search"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping=True is for use_beam_search"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        make(**options)
