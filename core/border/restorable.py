"""Restorable: how many requests of a dead engine's clients this engine takes without asking its bounds."""

from core.border.ledger import MAX_UNCONFIRMED
from ipc.wire.messages import Limits


class Restorable:
    """One stock for all clients. What was accepted once is never refused by a bound, and no client can take more.

    An engine accepts as many requests as its bounds allow. Twice as many may come from its clients, and some whose ends
    were on the way: those that ran count where the queue was full as well. Requests beyond are new ones to the bounds.
    """

    def __init__(self, limits: Limits) -> None:
        self._num_left = 2 * (limits.max_num_seqs + limits.max_num_queued_requests) + MAX_UNCONFIRMED

    def grant(self, num_resumed: int) -> int:
        """Take up to num_resumed requests from the stock, for a session; return how many. A negative number is 0."""
        num_granted = min(max(0, num_resumed), self._num_left)
        self._num_left -= num_granted
        return num_granted
