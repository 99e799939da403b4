"""Stages: requests whose prompt one replica computes and whose output another, which fetches the prompt's KV blocks.

A prefill replica gets the request with max_tokens=1. Its token is the request's first one, as at any replica; then the
request goes on elsewhere, as one does whose replica was lost. Whether the blocks come or are computed again is the
second replica's affair (docs/scale_out.md), so nothing is held and nothing is awaited here.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from frontend.fleet.forwarding import Routed
from frontend.fleet.placement import Matches
from frontend.fleet.replicas import Replicas
from frontend.fleet.requests import RoutedRequests
from ipc.tables.arrays import Bools
from ipc.wire.messages import AddRequest, FinishReason

_EXACT = "L2"  # the level at which another replica goes on with the same tokens


class Ended(NamedTuple):
    """Outputs in which no request ends that has only ended its first stage, and the first rows of these."""

    routed: Routed
    rows: list[int]


class Stages:
    """The stages of a fleet's requests. min_tokens: fewest tokens to compute of prompts that have a first stage."""

    def __init__(self, replicas: Replicas, requests: RoutedRequests, min_tokens: int) -> None:
        self._replicas, self._requests, self._min_tokens = replicas, requests, min_tokens

    def closed_for(self, row: int, matches: Matches, num_tokens: int) -> list[int]:
        """Return the open replicas that are not to get a request now: those of the other stage, unless all are."""
        replicas = self._replicas
        if not replicas.num_prefill:
            return []
        wanted = replicas.prefills if self._has_first(row, matches, num_tokens) else ~replicas.prefills
        if not (replicas.is_open & wanted).any():
            return []
        closed: list[int] = (replicas.is_open & ~wanted).nonzero()[0].tolist()
        return closed

    def begin(self, row: int, at: int, matches: Matches, num_tokens: int) -> None:
        """Note where a request is placed."""
        is_first = bool(self._replicas.prefills[at]) and self._has_first(row, matches, num_tokens)
        self._requests.prefilling[row] = is_first

    def messages(self, row: int, messages: list[msgspec.Struct]) -> list[msgspec.Struct]:
        """Return what a replica gets, of what one gets that runs the whole request."""
        first = messages[0]
        if not self._requests.prefilling[row] or not isinstance(first, AddRequest):
            return messages
        params = msgspec.structs.replace(first.params, max_tokens=1, min_tokens=min(1, first.params.min_tokens))
        return [msgspec.structs.replace(first, params=params), *messages[1:]]

    def end(self, routed: Routed) -> Ended:
        """Take ends of first stages out of a replica's outputs: the request goes on, so its client learns of no end."""
        requests, columns = self._requests, routed.columns
        if (
            not self._replicas.num_prefill
            or columns.finish is None
            or not (which := self._ended(routed, columns.finish)).any()
        ):
            return Ended(routed, [])
        finish = np.where(which, 0, columns.finish).astype(np.uint8)
        outputs = msgspec.structs.replace(routed.outputs, finish=finish.tobytes())
        rows = requests.firsts(routed.rows[which])
        requests.prefilling[rows], requests.prefilled[rows] = False, True
        return Ended(Routed(outputs, columns._replace(finish=finish), routed.rows), rows)

    def _ended(self, routed: Routed, finish: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> Bools:
        ended: Bools = self._requests.prefilling[routed.rows] & (finish == FinishReason.LENGTH)
        return ended

    def _has_first(self, row: int, matches: Matches, num_tokens: int) -> bool:
        requests, replicas = self._requests, self._replicas
        if requests.prefilled[row]:
            return False
        request = requests.request(requests.ticket(row))
        if not isinstance(request, AddRequest) or request.params.n > 1 or request.params.use_beam_search:
            return False
        if request.params.max_tokens == 1 or request.params.prompt_logprobs is not None or requests.num_output(row):
            return False
        cached = max((tokens for at, tokens in matches.items() if not replicas.prefills[at]), default=0)
        if num_tokens - cached < self._min_tokens:
            return False
        welcomes = (one.welcome for one in replicas.sessions)
        return all(
            one is None or (one.numerics == _EXACT and num_tokens + 1 < one.limits.max_model_len) for one in welcomes
        )
