"""Beam search: its parameters, under vLLM's names, and the parameters that cannot be combined with use_beam_search."""

from typing import Any, NamedTuple

from ipc.errors import InvalidRequestError

MAX_BEAMS = 64
#: Most output tokens of a beam search: an answer's count of tokens is a uint16 (ipc.wire.messages.Outputs).
MAX_BEAM_TOKENS = 65_535
#: MAX_BEAM_TOKENS to this power is a float32.
MAX_LENGTH_PENALTY = 8.0

_CHOICES = "sample n choices and use the one with the best cumulative_logprob / number of tokens"
_ALL_LOGPROBS = -1


def num_rows(params: Any) -> int:
    """Return how many rows of the batch a request takes: its choices, or the beams of its search."""
    rows: int = params.n if params.best_of is None else params.best_of
    return rows


def num_candidates(params: Any, num_eos: int) -> int:
    """Return how many of a beam's most likely next tokens can matter to its search.

    At most `beams` of one beam's candidates continue or finish, and as many ending tokens as there are may precede
    them. The candidates include those that logprobs reports. num_eos: EOS tokens of the model.
    """
    num_ends = (0 if params.ignore_eos else num_eos) + len(params.stop_token_ids or ())
    needed: int = max(num_rows(params) + num_ends, params.logprobs or 0)
    return needed


def check_beam_search(params: Any) -> None:
    """Check the parameters of a beam search, or that none are set without use_beam_search.

    params: SamplingParams. Errors: InvalidRequestError that names the parameter.
    """
    if not isinstance(params.use_beam_search, bool):
        raise InvalidRequestError(f"use_beam_search must be True or False, got {params.use_beam_search!r}")
    if not params.use_beam_search:
        _check_unused(params)
        return
    width = params.n if params.best_of is None else params.best_of
    if params.n > MAX_BEAMS:
        raise InvalidRequestError(f"n of a beam search is at most {MAX_BEAMS}, got {params.n}")
    if isinstance(width, bool) or not isinstance(width, int) or not params.n <= width <= MAX_BEAMS:
        raise InvalidRequestError(
            f"best_of (the number of beams) must be in [n={params.n}, {MAX_BEAMS}], got {width!r}"
        )
    params.best_of = width
    penalty, most = params.length_penalty, MAX_LENGTH_PENALTY
    if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not -most <= penalty <= most:
        raise InvalidRequestError(f"length_penalty must be a number in [{-most:g}, {most:g}], got {penalty!r}")
    params.length_penalty = float(penalty)
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        raise InvalidRequestError(f'early_stopping must be True, False or "never", got {params.early_stopping!r}')
    if params.stop not in (None, [], ()):
        raise InvalidRequestError(
            f"stop={params.stop!r} and use_beam_search cannot be combined: the engine, which ends beams, has no text: "
            "use stop_token_ids"
        )
    if params.logprobs == _ALL_LOGPROBS:
        raise InvalidRequestError(
            "logprobs=-1 and use_beam_search cannot be combined: each beam would keep the whole vocabulary for each "
            "of its tokens; give a number"
        )
    if params.max_tokens is not None and isinstance(params.max_tokens, int) and params.max_tokens > MAX_BEAM_TOKENS:
        raise InvalidRequestError(f"max_tokens of a beam search is at most {MAX_BEAM_TOKENS}, got {params.max_tokens}")


def _check_unused(params: Any) -> None:
    """Check that the parameters of beam search have their defaults if there is no beam search."""
    if params.best_of not in (None, 1, params.n) or isinstance(params.best_of, bool):  # the n best of n are all of them
        raise InvalidRequestError(
            f"best_of={params.best_of!r} is the number of beams, for use_beam_search; without one, {_CHOICES}"
        )
    params.best_of = None
    if params.length_penalty != 1.0 or isinstance(params.length_penalty, bool):
        raise InvalidRequestError(
            f"length_penalty={params.length_penalty!r} is for use_beam_search; without one, {_CHOICES}"
        )
    params.length_penalty = 1.0
    if params.early_stopping is not False:
        raise InvalidRequestError(
            f"early_stopping={params.early_stopping!r} is for use_beam_search; without one, {_CHOICES}"
        )


class BeamSearchParams(NamedTuple):
    """The parameters of LLM.beam_search(): names and defaults are vLLM's, and early_stopping is transformers'."""

    beam_width: int  # beams, and returned sequences
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # logits are divided by it before they are scored; 0 = 1
    length_penalty: float = 1.0  # a score is the sum of log probabilities / number of tokens ** length_penalty
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False  # or "never"
