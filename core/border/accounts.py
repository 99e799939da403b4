"""Accounts: what the unfinished requests of one client or tenant use, and how much each may use.

A client's share depends on what the others leave: it may have as many queue slots as are left over, plus as many as can
run at once. So a single client can fill half of a long queue, and a client that comes later finds room, however greedy
the earlier ones were.
"""

from typing import NamedTuple

import msgspec

from core.border.inbox import num_tokens
from ipc.wire.messages import AddRequest, Submission

#: Bytes of Python objects, measured on CPython 3.11 to 3.13: of an entry of logit_bias (a slot of a dict, an int and a
#: float), of a token id in a list, and of one choice of a waiting request.
_BIAS_BYTES, _TOKEN_BYTES, _CHOICE_BYTES = 112, 40, 2048


class Load(NamedTuple):
    """What one request uses while it is unfinished."""

    num_choices: int
    num_tokens: int  # over all choices
    num_bytes: int  # kept in memory
    has_begun: bool = False  # its first choice runs or has run, so the request is not waiting in the queue


class Account(msgspec.Struct, eq=False):
    """Sums over unfinished requests."""

    num_requests: int = 0
    num_queued: int = 0  # choices of requests that have not started
    num_queued_tokens: int = 0
    num_bytes: int = 0

    def add(self, load: Load) -> None:
        """Count a new request."""
        self.num_requests += 1
        self.num_queued += load.num_choices
        self.num_queued_tokens += load.num_tokens
        self.num_bytes += load.num_bytes

    def begin(self, load: Load) -> None:
        """Count a request as started."""
        self.num_queued -= load.num_choices
        self.num_queued_tokens -= load.num_tokens

    def remove(self, load: Load) -> None:
        """Stop counting a request, which has ended."""
        self.num_requests -= 1
        self.num_bytes -= load.num_bytes
        if not load.has_begun:
            self.begin(load)


def load_of(message: Submission, frame_bytes: int) -> Load:
    """Return what this request uses. frame_bytes: its length as received."""
    if not isinstance(message, AddRequest):
        num_bytes = frame_bytes + len(message.prompt_token_ids) + _CHOICE_BYTES
        return Load(1, num_tokens(message), num_bytes)
    params = message.params
    num_entries = len(params.allowed_token_ids or ()) + len(params.stop_token_ids or ())
    num_entries += sum(map(len, params.bad_words_token_ids or ()))
    more_prompts = (2 * params.n - 1) * len(message.prompt_token_ids)  # a choice has the tokens, and hashes of blocks
    num_bytes = frame_bytes + more_prompts + _CHOICE_BYTES * params.n
    num_bytes += _BIAS_BYTES * len(params.logit_bias or ()) + _TOKEN_BYTES * num_entries
    return Load(params.n, num_tokens(message), num_bytes)
