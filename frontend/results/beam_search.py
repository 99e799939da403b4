"""The results of beam_search(), in vLLM's form, and the sampling parameters of a request for one."""

from dataclasses import dataclass, field

from frontend.results.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from ipc.errors import InvalidRequestError
from ipc.params.beam_search import MAX_BEAMS, BeamSearchParams
from ipc.params.sampling_params import SamplingParams


@dataclass(slots=True)
class BeamSearchSequence:
    """One finished sequence. EOS is part of `tokens` only with include_stop_str_in_output."""

    tokens: list[int]  # the prompt's, then the output's
    text: str  # of all of them
    cum_logprob: float  # sum of the output's log probabilities, including EOS
    score: float  # cum_logprob / number of output tokens ** length_penalty, counting EOS
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the output's tokens, including EOS
    finish_reason: str | None = None  # "stop" | "length"
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beam_width best sequences of one prompt, the best first; fewer if there are no more."""

    sequences: list[BeamSearchSequence]


def sampling_params(params: BeamSearchParams) -> SamplingParams:
    """Return the parameters of the request. Errors: InvalidRequestError."""
    width = params.beam_width
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_BEAMS:
        raise InvalidRequestError(f"beam_width must be an integer in [1, {MAX_BEAMS}], got {width!r}")
    return SamplingParams(
        use_beam_search=True,
        n=width,
        best_of=width,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        include_stop_str_in_output=params.include_stop_str_in_output,
        logprobs=0,
    )


def beam_search_output(output: RequestOutput, params: BeamSearchParams, prompt_text: str) -> BeamSearchOutput:
    """Return a finished request's result. prompt_text: goes before the text of each sequence."""
    prompt, found = output.prompt_token_ids, [one for one in output.outputs if one.token_ids]
    return BeamSearchOutput([_sequence(one, prompt, params, prompt_text) for one in found])


def _sequence(
    one: CompletionOutput, prompt: list[int], params: BeamSearchParams, prompt_text: str
) -> BeamSearchSequence:
    total = one.cumulative_logprob or 0.0
    has_stop = one.finish_reason == "stop" and not params.include_stop_str_in_output
    return BeamSearchSequence(
        tokens=prompt + (one.token_ids[:-1] if has_stop else one.token_ids),
        text=prompt_text + one.text,
        cum_logprob=total,
        score=total / len(one.token_ids) ** params.length_penalty,
        logprobs=one.logprobs or [],
        finish_reason=one.finish_reason,
        stop_reason=one.stop_reason,
    )
