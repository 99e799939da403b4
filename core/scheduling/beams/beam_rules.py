"""The rules of a beam search: which beams go on, which sequences are finished, and when the search ends.

These are the rules of transformers (GenerationMixin._beam_search, 5.x) for a single request: scores in float32; ties go
to the earlier beam, then to the smaller token id. A forbidden token is never a candidate, so there may be fewer
sequences than beams. (In transformers it has the score minus infinity and can end up in a sequence if nothing else is
left.)
"""

from typing import NamedTuple

import numpy as np

from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import Floats, Int32s
from ipc.wire.messages import FinishReason

#: A score that no sequence has: for beams that are copies of the first one, and for empty places of finished sequences.
_NEVER = np.float32(-1e9)


class Candidates(NamedTuple):
    """The most likely next tokens of one beam, best first."""

    token_ids: Int32s  # [K]
    logprobs: Floats  # [K]


class Token(NamedTuple):
    """A token of a beam, and the beam up to it."""

    before: "Token | None"
    offers: Candidates  # the beam's candidates, this token included
    place: int  # its index in them

    @property
    def token_id(self) -> int:
        """Return the token's id."""
        return int(self.offers.token_ids[self.place])


class Finished(NamedTuple):
    """A finished sequence."""

    last: Token
    reason: FinishReason
    stop_token: int | None  # the one of stop_token_ids that ended it


class NextBeams(NamedTuple):
    """The beams of the next step, the best first."""

    parents: list[int]  # for each beam, the index of the beam that it extends
    token_ids: list[int]


class BeamSearch:
    """The state of one search: its running beams and its best finished sequences."""

    def __init__(self, params: SamplingParams, width: int, max_tokens: int, eos_token_ids: tuple[int, ...]) -> None:
        """Start with `width` beams without tokens. max_tokens: a sequence with this many tokens is finished."""
        self._width, self._max_tokens = width, max_tokens
        self._penalty, self._early_stopping = params.length_penalty, params.early_stopping
        self._stops = tuple(params.stop_token_ids or ())
        self._ends = (() if params.ignore_eos else eos_token_ids) + self._stops
        self._num_kept = max(2, 1 + len(self._ends)) * width  # enough that `width` beams go on even if all others end
        self.beams: list[Token | None] = [None] * width
        self._scores = np.full(width, _NEVER)  # sum of log probabilities of each running beam
        self._scores[0] = 0
        self._finished: list[Finished | None] = [None] * width
        self._finished_scores = np.full(width, _NEVER)
        self._may_improve = True
        self._num_tokens = 0  # number of tokens of each beam

    def advance(self, candidates: list[Candidates]) -> NextBeams | None:
        """Take each beam's candidates and return the next beams, or None if the search has ended.

        If fewer beams can go on than the search has, the others become copies of the best one.
        """
        offers = np.array([len(one.token_ids) for one in candidates])
        owners, places = np.arange(len(candidates)).repeat(offers), np.concatenate([np.arange(n) for n in offers])
        token_ids = np.concatenate([one.token_ids for one in candidates])
        logprobs = np.concatenate([one.logprobs for one in candidates])
        totals = logprobs + self._scores[owners]
        order = np.argsort(-totals, kind="stable")[: self._num_kept]
        owners, places, token_ids, totals = owners[order], places[order], token_ids[order], totals[order]
        self._num_tokens += 1
        ends = np.isin(token_ids, self._ends) | (self._num_tokens >= self._max_tokens)
        tokens = [
            Token(self.beams[owner], candidates[owner], place)
            for owner, place in zip(owners.tolist(), places.tolist(), strict=True)
        ]
        self._finish(totals, ends, tokens)
        running = totals + np.where(ends, _NEVER, np.float32(0))
        best = np.argsort(-running, kind="stable")[: self._width]
        all_end = not np.count_nonzero(running > _NEVER / 2)
        copies = np.zeros(self._width - len(best), np.int64)
        self._scores = np.append(running[best], np.full(len(copies), _NEVER))
        best = np.append(best, best[copies]) if len(best) else best
        self.beams = [tokens[index] for index in best.tolist()]
        if not self._goes_on(all_end):
            return None
        return NextBeams(owners[best].tolist(), token_ids[best].tolist())

    def results(self, count: int) -> list[Finished]:
        """Return the best `count` finished sequences, the best first."""
        return [one for one in self._finished[:count] if one is not None]

    def _finish(self, totals: Floats, ends: "np.ndarray[tuple[int], np.dtype[np.bool_]]", tokens: list[Token]) -> None:
        """Add the sequences that end here and rank among the first candidates to the best finished ones."""
        enters = ends & (np.arange(len(totals)) < self._width) & (totals > _NEVER / 2)
        scores = totals / np.float32(self._num_tokens**self._penalty)
        if self._early_stopping is True and None not in self._finished:
            scores += _NEVER
        if not self._may_improve:
            scores += _NEVER
        scores = scores + np.where(enters, np.float32(0), _NEVER)
        new = [self._ended(token) if enters[index] else None for index, token in enumerate(tokens)]
        merged, merged_scores = [*self._finished, *new], np.concatenate([self._finished_scores, scores])
        best = np.argsort(-merged_scores, kind="stable")[: self._width]
        self._finished = [merged[index] for index in best.tolist()]
        self._finished_scores = merged_scores[best]

    def _ended(self, last: Token) -> Finished:
        if last.token_id not in self._ends:
            return Finished(last, FinishReason.LENGTH, None)
        return Finished(last, FinishReason.STOP, last.token_id if last.token_id in self._stops else None)

    def _goes_on(self, all_end: bool) -> bool:
        """Return whether the running beams may still produce a better sequence."""
        reaches_end = self._early_stopping == "never" and self._penalty > 0
        length = self._max_tokens if reaches_end else self._num_tokens
        best = self._scores[0] / np.float32(length**self._penalty)
        is_full = None not in self._finished
        worst = self._finished_scores.min() if is_full else _NEVER
        self._may_improve = self._may_improve and bool(best > worst)
        return self._may_improve and not (is_full and self._early_stopping is True) and not all_end


def sequence(last: Token) -> list[Token]:
    """Return the tokens of a beam from its first one to this one."""
    tokens, token = [last], last
    while token.before is not None:
        token = token.before
        tokens.append(token)
    tokens.reverse()
    return tokens


def reported(tokens: list[Token], num_top: int) -> tuple[Int32s, Int32s, Floats]:
    """Return (counts [T], token_ids, values): what is reported of a sequence's tokens.

    For each position: its token, then the num_top most likely candidates of its beam, or all if there are fewer.
    """
    places = [np.append(one.place, np.arange(min(num_top, len(one.offers.token_ids)))) for one in tokens]
    counts = np.array([len(each) for each in places], np.int32)
    pairs = list(zip(tokens, places, strict=True))
    token_ids = np.concatenate([one.offers.token_ids[each] for one, each in pairs])
    return counts, token_ids, np.concatenate([one.offers.logprobs[each] for one, each in pairs])
