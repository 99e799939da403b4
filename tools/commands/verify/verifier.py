"""Verifier: answers that are known are computed again, many tokens a step, and compared token by token.

It is speculation with given drafts (docs/speculation.md): the engine, its scheduler and its sampler are those that
generate, and a draft is kept if and only if plain sampling draws the same token. So an answer of n tokens costs about
as much as a prompt of n tokens. A beam search is run again: which beams it keeps depends on all of them.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np

from core.border.validation import validate_request
from core.engine import EngineCore
from core.execution.executor import ModelInfo
from core.grammars.checker import CheckedGrammars
from core.inputs import EngineInput, EngineReply
from core.process.prepare import prepare
from core.proposers.given import GivenDrafts
from core.scheduling.scheduler import Scheduler
from frontend.text.tokenizer import Tokenizer
from ipc.errors import InvalidRequestError, ModelFileError
from ipc.options.config import EngineConfig
from ipc.options.schedulers import BUILT_IN_SCHEDULER
from ipc.options.speculation import MAX_DRAFTS, SpeculativeConfig
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.wire.messages import Abort, AddRequest, FinishReason, Outputs, RequestFailed
from tools.commands.replay.output_rows import OutputRow, output_rows

#: Most drafts of a step. Each needs a row of logits, so there are fewer with a large vocabulary.
MOST_DRAFTS = 512
_MAX_LOGITS_BYTES = 128 << 20
_ANY_STEP_NS = (1_000_000,) * 8  # given, so that none is measured; no rule looks at them
_CLIENT = 1
_STEP_NS = 1_000_000


class Answer(NamedTuple):
    """One choice, as it is claimed to be.

    ends: how the engine ended it; None = that is not to be compared. text_ends: number of tokens up to and including
    the one that completes a stop string; None = none does.
    """

    token_ids: Sequence[int]
    ends: FinishReason | None = None
    text_ends: int | None = None


class Claim(NamedTuple):
    """A request, and the answers that are said to follow from it, one for each of its n choices."""

    message: AddRequest
    answers: Sequence[Answer]


class Difference(NamedTuple):
    """The first token of an answer that differs. None stands for the answer's end."""

    answer: int  # index of the choice
    position: int  # in the answer, from 0
    expected: int | None  # computed here
    got: int | None  # claimed


class Outcome(NamedTuple):
    """What became of a claim. failure: why it cannot be an answer of this engine; "" = no reason was found."""

    difference: Difference | None = None
    failure: str = ""
    has_no_adapter: bool = False  # the failure is that its adapter is not loaded


class Verifier:
    """An engine in this process that verifies claims, until close().

    Errors: those of an engine's start.
    """

    def __init__(self, config: EngineConfig) -> None:
        drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=MAX_DRAFTS, step_ns=_ANY_STEP_NS)
        none: dict[str, Any] = {"capture": None, "async_scheduling": False, "request_metrics": False}
        none["scheduler_cls"] = BUILT_IN_SCHEDULER  # it takes the drafts, and no token depends on it
        config = msgspec.structs.replace(config, speculative_config=drafts, **none)
        prepared = prepare(config, lambda phase: None)
        self.config, self._executor = prepared.config, prepared.executor
        self.tokenizer_hash = prepared.tokenizer.tokenizer_hash
        self._tokenizer_files = prepared.tokenizer.files
        self._engine = EngineCore(self.config, self._executor)
        assert isinstance(self._engine.scheduler, Scheduler), "the built-in scheduler was asked for"
        speculation = self._engine.scheduler.speculation
        most = min(MOST_DRAFTS, max(MAX_DRAFTS, _MAX_LOGITS_BYTES // (4 * self.info.vocab_size)))
        if self.info.state_bytes:  # each draft needs a place for the state before it
            most = min(most, speculation.most_in_step)
        self._drafts = GivenDrafts(self._engine.scheduler.table)
        speculation.use_only(self._drafts, most)
        self._grammars = CheckedGrammars(self._executor.grammars)
        self._now_ns, self._num_claims = 0, 0
        self.num_steps = 0

    @property
    def info(self) -> ModelInfo:
        """The model's description."""
        return self._executor.info

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None = it has none that this version reads. Then no answer was cut by its text."""
        try:
            return Tokenizer.from_files(self._tokenizer_files)
        except ModelFileError:
            return None

    def close(self) -> None:
        """Release the engine."""
        self._grammars.close()
        self._executor.close()

    def verify(self, claims: Sequence[Claim]) -> list[Outcome]:
        """Compute all claims together; return what became of each."""
        first, outcomes = self._num_claims, [Outcome()] * len(claims)
        self._num_claims += len(claims)
        open_: dict[int, _Open] = {}
        inbox: list[tuple[int, EngineInput]] = []
        for number, claim in enumerate(claims, first):
            message = _message(claim, number)
            refused = self._check(message)
            if refused is not None:
                outcomes[number - first] = refused
                continue
            open_[number] = _Open(claim)
            for choice, answer in enumerate(() if message.params.use_beam_search else claim.answers):
                self._drafts.give((_CLIENT, number, choice), self._known(answer.token_ids))
            inbox.append((_CLIENT, message))
        while open_:
            ended = [pair for reply in self._step(inbox) for pair in self._take(reply, open_)]
            inbox = [(_CLIENT, _abort(number, choice)) for number, choice in ended]
            for number, choice in ended:
                self._drafts.forget((_CLIENT, number, choice))
            for number in [number for number, one in open_.items() if not one.num_going]:
                outcomes[number - first] = open_.pop(number).outcome
            assert not open_ or inbox or self._engine.has_work, "the engine has lost a request"
        self._step(inbox)
        return outcomes

    def _step(self, inbox: Sequence[tuple[int, EngineInput]]) -> list[EngineReply]:
        self._now_ns += _STEP_NS
        self.num_steps += 1
        return [reply for _, reply in self._engine.step(inbox, self._now_ns)]

    def _known(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens before the first that the model does not have: the model reads drafts unchecked.

        The token that the model gives in that place is then the difference.
        """
        outside = (at for at, token in enumerate(token_ids) if not 0 <= token < self.info.vocab_size)
        return token_ids[: next(outside, len(token_ids))]

    def _check(self, message: AddRequest) -> Outcome | None:
        """Check and prepare a request as an engine's border does; return why it is refused, None if it is not.

        Its adapter is kept as long as the message lives.
        """
        info, adapters = self.info, self._executor.adapters
        sizes = {"vocab_size": info.vocab_size, "max_model_len": self.config.max_model_len}
        try:
            validate_request(message, **sizes, max_logprobs=0, tasks=info.tasks)
            if self._grammars.needs(message):
                self._grammars.prepare(message)
        except InvalidRequestError as error:
            return Outcome(failure=str(error))
        if message.adapter is None:
            return None
        try:
            if adapters is not None:
                adapters.hold(message.adapter)
                return None
        except InvalidRequestError:
            pass
        text = f"its adapter, {message.adapter.digest}, is not loaded: name its files in lora_modules"
        return Outcome(failure=text, has_no_adapter=True)

    def _take(self, reply: EngineReply, open_: "dict[int, _Open]") -> list[tuple[int, int]]:
        """Compare what a reply has; return the (number, choice) pairs that are done with."""
        if isinstance(reply, RequestFailed) and (one := open_.get(reply.number)) is not None:
            one.fail(reply.message)
        if not isinstance(reply, Outputs):
            return []
        rows = [(open_.get(row.number), row) for row in output_rows(reply)]
        return [(row.number, row.choice) for one, row in rows if one is not None and one.take(row)]


class _Open:
    """A claim that is being computed."""

    def __init__(self, claim: Claim) -> None:
        self._answers = claim.answers
        self._places = [0] * len(claim.answers)
        self._is_going = [True] * len(claim.answers)
        self.outcome = Outcome()

    @property
    def num_going(self) -> int:
        return sum(self._is_going)

    def fail(self, text: str) -> None:
        self._is_going = [False] * len(self._answers)
        self.outcome = Outcome(failure=text)

    def take(self, row: OutputRow) -> bool:
        """Compare the new tokens of a choice; return whether it is done with now."""
        if not self._is_going[row.choice]:
            return False
        answer, place = self._answers[row.choice], self._places[row.choice]
        difference = _compare(answer, row, place)
        self._places[row.choice] += len(row.tokens)
        num_left = len(answer.token_ids) - self._places[row.choice]
        if answer.ends == FinishReason.STOP:  # else the next token is of no interest
            num_left += 1
        is_done = difference is not None or num_left <= 0 or bool(row.finish)
        if difference is not None:
            best = self.outcome.difference
            if best is None or difference[:2] < best[:2]:
                self.outcome = Outcome(difference)
        elif row.finish and answer.ends not in (None, row.finish) and self.outcome.difference is None:
            ends = row.finish.name.lower(), answer.ends.name.lower() if answer.ends else ""
            self.outcome = Outcome(failure=f"answer {row.choice} ends by {ends[0]} here, and by {ends[1]} there")
        self._is_going[row.choice] = not is_done
        return is_done


def _compare(answer: Answer, row: OutputRow, place: int) -> Difference | None:
    """Return the first difference of the tokens of a row, the first of which is at `place` in the answer."""
    claimed = answer.token_ids
    for position, token in enumerate(row.tokens, place):
        if position == len(claimed):
            return None if answer.ends is None else Difference(row.choice, position, token, None)
        if position == answer.text_ends:
            return Difference(row.choice, position, None, claimed[position])
        if token != claimed[position]:
            return Difference(row.choice, position, token, claimed[position])
    end = place + len(row.tokens)
    return Difference(row.choice, end, None, claimed[end]) if row.finish and end < len(claimed) else None


def _message(claim: Claim, number: int) -> AddRequest:
    """Return the request that computes the claimed tokens and one more, or the whole search, and reports no more."""
    params = claim.message.params
    most = 1 + max(len(answer.token_ids) for answer in claim.answers)
    if params.max_tokens is not None:
        most = min(most, params.max_tokens)
    return msgspec.structs.replace(
        claim.message,
        number=number,
        params=params if params.use_beam_search else plain_params(params, most),
        priority=0,
        deadline_ms=0,
        cache_salt="",
        delivered=[],
        tenant="",
    )


def plain_params(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """Return parameters that draw the same first max_tokens tokens."""
    return params.changed(
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        logprobs=None,
        prompt_logprobs=None,
        stop=None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _abort(number: int, choice: int) -> Abort:
    return Abort(np.array([number], "<u4").tobytes(), np.array([choice], "<u2").tobytes())
