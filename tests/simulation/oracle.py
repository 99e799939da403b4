"""The oracle: the tokens of a request that nothing disturbs, and the other ends that a fault may give it.

The fake executor's tokens are a function of the ids before them, so an undisturbed run is a calculation.
tests/simulation/test_simulation.py compares it with requests that run alone on a fresh engine.
"""

from enum import Enum
from typing import NamedTuple

from core.executors.fake import choice_seed
from frontend.client.received_logprobs import PositionLogprobs
from ipc.errors import DeadlineExceededError, EngineCoreError, EngineDeadError, InvalidRequestError, RequestFailedError
from ipc.wire.messages import FinishReason
from tests.simulation.plan import Ask
from tests.simulation.world import Failure

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class Undisturbed(NamedTuple):
    """One choice of a request, run alone."""

    tokens: list[int]
    finish: FinishReason  # NONE: it fails after these tokens
    stop_token: int | None  # where one of stop_token_ids ended it


class Rules(NamedTuple):
    """The options of an engine that decide tokens. poison: a token after which a request fails, None = none."""

    vocab_size: int
    eos: int
    max_model_len: int
    poison: int | None


def undisturbed(ask: Ask, choice: int, rules: Rules) -> Undisturbed:
    """Calculate the run of one choice of a request; without tokens where the request is wrong."""
    if max(ask.prompt) >= rules.vocab_size or rules.poison in ask.prompt:
        return Undisturbed([], FinishReason.NONE, None)
    params, tokens = ask.params, list[int]()
    seed = choice_seed(ask.seed, choice) if params.temperature > 0 else 0
    total = sum(_term(token, position) for position, token in enumerate(ask.prompt))
    room = rules.max_model_len - len(ask.prompt)
    end = len(ask.prompt) + min(params.max_tokens or room, room)
    for position in range(len(ask.prompt), end):
        token = _mix((total + position * _GOLDEN + _mix(seed)) & _MASK) % rules.vocab_size
        total += _term(token, position)
        tokens.append(token)
        if len(tokens) >= params.min_tokens:
            if token == rules.eos and not params.ignore_eos:
                return Undisturbed(tokens, FinishReason.STOP, None)
            if token in (params.stop_token_ids or ()):
                return Undisturbed(tokens, FinishReason.STOP, token)
        if token == rules.poison and position + 1 < end:
            return Undisturbed(tokens, FinishReason.NONE, None)
    return Undisturbed(tokens, FinishReason.LENGTH, None)


def _mix(value: int) -> int:
    """The finalizer of splitmix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _term(token: int, position: int) -> int:
    return _mix(((token + 1) * _GOLDEN + _mix(position + 1)) & _MASK)


def check_logprobs(
    found: list[PositionLogprobs], tokens: list[int], start: int, num_top: int | None, vocab_size: int
) -> None:
    """Compare with the fake executor's. tokens: from position `start` on. num_top: None = none were asked for."""
    wanted = [] if num_top is None else tokens
    if len(found) != len(wanted):
        raise Failure(f"log probabilities of {len(found)} tokens, of {len(wanted)} are due")
    for position, (token, one) in enumerate(zip(wanted, found, strict=True), start):
        ids = [(token + place) % vocab_size for place in range(1 + min(num_top or 0, vocab_size))]
        values = [-(position % 64 + place + 1) / 16 for place in range(len(ids))]
        if (one.rank, one.token_ids.tolist(), one.values.tolist()) != (3, ids, values):
            raise Failure(f"log probabilities at position {position} are {one}; {ids} and {values} are due")


class Excuse(Enum):
    """An event in the life of a client that allows its requests another end than their undisturbed one."""

    ENGINE_DIED = "the engine died"
    ENGINE_STOPPED = "the engine stood still"
    DRAINED = "the engine was drained"
    STOPPED = "the client stood still"
    SLOW = "its connection was slow"
    CUT = "its connection was cut"
    CUT_AGAIN = "its connection was cut more than once"
    QUEUE_BOUND = "the engine's queue is short"
    NOT_BEGUN = "the engine's queue is short, and the request had no token"
    DEADLINE = "the request had a deadline, which has passed"
    INVALID = "the request is wrong"
    POISONED = "a choice of the request has met the token after which it fails"
    MUST_BE_PINNED = "the request had no token, and there may be no room for a pin that it requires"


#: Kinds of errors, by class and a part of their text, with the events of which one must have happened.
_EXCUSES: list[tuple[type[EngineCoreError], str, tuple[Excuse, ...]]] = [
    (InvalidRequestError, "not in the vocabulary", (Excuse.INVALID,)),
    (RequestFailedError, "are not finite", (Excuse.POISONED,)),
    (DeadlineExceededError, "deadline has passed", (Excuse.DEADLINE,)),
    (RequestFailedError, "send again later", (Excuse.NOT_BEGUN, Excuse.STOPPED)),
    (RequestFailedError, "cannot be pinned", (Excuse.MUST_BE_PINNED,)),
    (RequestFailedError, "accepts no more requests", (Excuse.DRAINED,)),
    (EngineDeadError, "nothing arrived", (Excuse.STOPPED,)),
    (EngineDeadError, "there is no session", (Excuse.STOPPED, Excuse.SLOW)),
    (EngineDeadError, "did not read", (Excuse.STOPPED, Excuse.SLOW)),
    (EngineDeadError, "finishing its last requests", (Excuse.DRAINED,)),
    # A client goes on exactly on a new engine with the same model, and its streams are undisturbed. These are what is
    # left where no new engine comes in time.
    (EngineDeadError, "the engine stopped", (Excuse.ENGINE_DIED,)),
    (EngineDeadError, "the engine process has ended", (Excuse.ENGINE_DIED,)),
    (
        EngineDeadError,
        "did not answer again",
        (Excuse.ENGINE_DIED, Excuse.ENGINE_STOPPED, Excuse.STOPPED, Excuse.SLOW, Excuse.CUT_AGAIN),
    ),
    (EngineDeadError, "the engine closed the connection", (Excuse.CUT,)),
]


def check_error(error: EngineCoreError, excuses: set[Excuse]) -> str:
    """Check that one of the excuses explains the error, and return the kind of error. Errors: Failure."""
    for kind, text, allowed in _EXCUSES:
        if type(error) is kind and text in str(error):
            if excuses.isdisjoint(allowed):
                raise Failure(f"{error!r}, and none of {[one.value for one in allowed]}")
            return f"error: {text}"
    raise Failure(f"{error!r} is no outcome of any fault")


class Stream:
    """One choice of a submitted request, as its client's program reads it: each token once, in order."""

    def __init__(self, name: str, due: Undisturbed) -> None:
        self.tokens: list[int] = []
        self.aborted = False  # its program asked for it
        self.is_over = False
        self.name = name
        self.due = due

    def extend(self, tokens: list[int]) -> None:
        if tokens and self.is_over:
            raise Failure(f"{self.name} goes on after its end with {tokens}")
        self.tokens += tokens
        if self.tokens != self.due.tokens[: len(self.tokens)]:
            raise Failure(f"{self.name}: {self.tokens} was read and {self.due.tokens} is due")

    def end(self, finish: FinishReason, stop_token: int | None) -> None:
        """Compare the end that the engine reports."""
        self.is_over = True
        if finish == FinishReason.ABORT:
            if not self.aborted:
                raise Failure(f"{self.name} was aborted and nobody asked for it")
        elif (self.tokens, finish, stop_token) != self.due:
            raise Failure(f"{self.name} ended with {self.tokens}, {finish!r}, {stop_token}; {self.due} is due")
