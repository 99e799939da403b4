"""Verifier: answers that are known are computed again, many tokens a step, and compared token by token.

It is speculation with given drafts (docs/speculation.md): the engine, its scheduler and its sampler are those that
generate, and a draft is kept if and only if plain sampling draws the same token. So an answer of n tokens costs about
as much as a prompt of n tokens. A beam search is run again: which beams it keeps depends on all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from core.inputs import EngineInput, EngineReply
from core.proposers.given import GivenDrafts
from ipc.options.config import EngineConfig
from ipc.options.speculation import MAX_DRAFTS, SpeculativeConfig
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.wire.feature_messages import PutFeature
from ipc.wire.messages import Abort, AddRequest, FinishReason, Outputs, RequestFailed
from tools.commands.replay.output_rows import OutputRow, output_rows
from tools.commands.verify.local_engine import CLIENT, Difference, LocalEngine, Outcome

#: Most drafts of a step. Each needs a row of logits, so there are fewer with a large vocabulary.
MOST_DRAFTS = 1024
_STEP_TOKENS = 1024  # unless the caller chose a number: an answer of 512 tokens and its prompt fit into one step
_MAX_LOGITS_BYTES = 128 << 20
_ANY_STEP_NS = (1_000_000,) * 8  # given, so that none is measured; no rule looks at them


class Answer(NamedTuple):
    """One choice, as it is claimed to be.

    ends: how the engine ended it; None = that is not to be compared. text_ends: number of tokens up to and including
    the one that completes a stop string; None = none does.
    """

    token_ids: Sequence[int]
    ends: FinishReason | None = None
    text_ends: int | None = None


class Claim(NamedTuple):
    """A request, and the answers that are said to follow from it, one for each of its n choices.

    features: those that replace tokens of its prompt, in order.
    """

    message: AddRequest
    answers: Sequence[Answer]
    features: Sequence[PutFeature] = ()


class Verifier(LocalEngine):
    """An engine in this process that verifies claims, until close().

    Errors: those of an engine's start.
    """

    def __init__(self, config: EngineConfig) -> None:
        drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=MAX_DRAFTS, step_ns=_ANY_STEP_NS)
        tokens = _STEP_TOKENS if config.device == "cpu" else 0
        super().__init__(msgspec.structs.replace(config, speculative_config=drafts), tokens)
        speculation = self.scheduler.speculation
        most = min(MOST_DRAFTS, max(MAX_DRAFTS, _MAX_LOGITS_BYTES // (4 * self.info.vocab_size)))
        if self.info.state_bytes:  # each draft needs a place for the state before it
            most = min(most, speculation.most_in_step)
        self._drafts = GivenDrafts(self.scheduler.table)
        # A state after a prompt would be both a draft's and the prefix cache's. On a GPU the rows of a step with drafts
        # are computed as decoding ones, and an image's tokens, which see each other, are not.
        self._in_one_step = not self.info.state_bytes and self.config.device == "cpu"
        speculation.use_only(self._drafts, most, after_prompts=self._in_one_step)
        self._num_claims = 0

    def verify(self, claims: Sequence[Claim]) -> list[Outcome]:
        """Compute all claims together; return what became of each."""
        first, outcomes = self._num_claims, [Outcome()] * len(claims)
        self._num_claims += len(claims)
        open_: dict[int, _Open] = {}
        inbox: list[tuple[int, EngineInput]] = []
        for number, claim in enumerate(claims, first):
            message = self.admit(_message(claim, number), claim.features)
            if isinstance(message, Outcome):
                outcomes[number - first] = message
                continue
            open_[number] = _Open(claim)
            in_one_step = self._in_one_step and len(claim.answers) == 1  # choices wait for the prompt of the first
            for choice, answer in enumerate(() if message.params.use_beam_search else claim.answers):
                known = self._known(answer.token_ids)
                self._drafts.give((CLIENT, number, choice), known, after_prompt=in_one_step)
            inbox.append((CLIENT, message))
        while open_:
            ended = [pair for reply in self.step(inbox) for pair in self._take(reply, open_)]
            inbox = [(CLIENT, _abort(number, choice)) for number, choice in ended]
            for number, choice in ended:
                self._drafts.forget((CLIENT, number, choice))
            for number in [number for number, one in open_.items() if not one.num_going]:
                outcomes[number - first] = open_.pop(number).outcome
            assert not open_ or inbox or self.has_work, "the engine has lost a request"
        self.step(inbox)
        return outcomes

    def _known(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens before the first that the model does not have: the model reads drafts unchecked.

        The token that the model gives in that place is then the difference.
        """
        outside = (at for at, token in enumerate(token_ids) if not 0 <= token < self.info.vocab_size)
        return token_ids[: next(outside, len(token_ids))]

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
