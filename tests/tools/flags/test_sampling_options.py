"""The flags of sampling parameters, and the parameters that they give."""

import argparse
from typing import Any

import pytest

from ipc.errors import InvalidRequestError
from ipc.params.sampling_params import SamplingParams
from tools.flags.sampling_options import add_sampling_options, sampling_params

MODELS = {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1}  # what a model recommends


def read(*words: str, demo: dict[str, Any] | None = None) -> SamplingParams:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser, max_tokens=16)
    return sampling_params(parser.parse_args(words), MODELS, demo or {})


def test_what_is_given_comes_before_the_demos_and_the_models_own() -> None:
    assert (read().temperature, read().top_p, read().repetition_penalty) == (0.6, 0.95, 1.1)
    chosen = read("--top-p", "0.5", demo={"temperature": 0.2, "top_p": 0.1})
    assert (chosen.temperature, chosen.top_p) == (0.2, 0.5)


def test_a_beam_search_takes_no_defaults_of_draws() -> None:
    chosen = read("--use-beam-search", demo={"temperature": 0.2})
    assert (chosen.temperature, chosen.top_p, chosen.best_of, chosen.n) == (0.0, 1.0, 4, 1)
    assert chosen.repetition_penalty == 1.1
    flags = ("--beam-width", "6", "--length-penalty", "0.5", "--early-stopping", "never", "--temperature", "2")
    chosen = read("--use-beam-search", *flags)
    assert (chosen.best_of, chosen.length_penalty, chosen.early_stopping) == (6, 0.5, "never")
    assert chosen.temperature == 2.0
    assert read("--use-beam-search", "--early-stopping", "true").early_stopping is True


def test_flags_of_a_search_without_one_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="best_of=6 is the number of beams, for use_beam_search"):
        read("--best-of", "6")
    with pytest.raises(InvalidRequestError, match="early_stopping=True is for use_beam_search"):
        read("--early-stopping", "true")
