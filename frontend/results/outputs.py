"""The results of generate(): RequestOutput and its parts, in vLLM's form."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from frontend.client.request_events import RequestEvent
from ipc.params.sampling_params import SamplingParams
from ipc.wire.lora_messages import AdapterId
from ipc.wire.pin_messages import PinAnswer
from ipc.wire.placed_feature import PlacedFeature

#: finish_reason of a prompt that was too long to run, if that is not an error (LLM.generate, ignore_too_long).
IGNORED = "ignored"


@dataclass(slots=True)
class Logprob:
    """The log probability of one token.

    logprob: the model's, or what the engine's logprobs_mode selects. rank: from 1. decoded_token: the token's text; for
    a token that is part of a character, the text that it completes.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


#: The log probabilities at one position by token id: the position's own token first, then the most likely ones.
TokenLogprobs: TypeAlias = dict[int, Logprob]


@dataclass(slots=True)
class RequestMetrics:
    """The times of one request on this machine's monotonic clock, in seconds; 0.0 = has not happened."""

    arrival_time: float
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    finished_time: float = 0.0
    num_generation_tokens: int = 0  # of the longest choice
    first_scheduled_time: float = 0.0  # arrival_time + time_in_queue: no clock of another process
    time_in_queue: float | None = None  # seconds in the engine before it began; None = start unknown
    num_preemptions: int = 0  # of all choices
    num_draft_tokens: int = 0  # draft tokens (speculative_config) that the engine verified; known at the end
    num_accepted_tokens: int = 0  # of these: accepted
    events: tuple[RequestEvent, ...] = ()  # in the order in which the engine reported them

    @property
    def ttft(self) -> float | None:
        """Return the time to first token in seconds; None before the first token."""
        return self.first_token_time - self.arrival_time if self.first_token_time else None

    @property
    def tpot(self) -> float | None:
        """Return the mean time per output token after the first in seconds; None with fewer than two tokens."""
        if self.num_generation_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_generation_tokens - 1)


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request. `text` and `token_ids` are all so far, or with DELTA the part that is new."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # of all tokens so far; None without logprobs
    logprobs: list[TokenLogprobs] | None = None  # for each of token_ids
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "ignored"; None while it continues
    stop_reason: int | str | None = None  # the stop token id or stop string; None for EOS
    lora_request: None = None
    #: (index of the first token in the whole answer, version) of the weights that computed the tokens from there on;
    #: empty: all come from the weights that the engine started with (LLM.update_weights()).
    weights_versions: tuple[tuple[int, int], ...] = ()

    def finished(self) -> bool:
        """Return whether the choice has ended."""
        return self.finish_reason is not None


class Submitted(NamedTuple):
    """What the engine was sent with the prompt's tokens. seed: None = the session derives it from the number."""

    number: int
    params: SamplingParams
    seed: int | None
    adapter: AdapterId | None
    features: Sequence[PlacedFeature]


@dataclass(slots=True)
class RequestOutput:
    """A request and what it has produced."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None for the first token: it has no prediction
    lora_request: None = None
    num_cached_tokens: int = 0  # prompt tokens whose keys and values were cached
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None
    submitted: Submitted | None = None  # for receipts; None: the request did not run
    pins: Sequence[PinAnswer] = ()  # to the pins of its prompt, in their order
