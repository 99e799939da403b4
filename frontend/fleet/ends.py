"""Ends: how requests of a fleet end, or continue elsewhere, without a message from a replica."""

from frontend.fleet.dispatch import Dispatch
from frontend.fleet.membership import EXACT, Membership
from ipc.wire.messages import ErrorCode, RequestFailed, ServerMessage


class Ends:
    """The ends of requests. to_clients: gets messages with their clients. epoch: of the fleet's Outputs."""

    def __init__(
        self, dispatch: Dispatch, membership: Membership, to_clients: list[tuple[int, ServerMessage]], epoch: int
    ) -> None:
        self.epoch = epoch
        self._dispatch = dispatch
        self._membership = membership
        self._to_clients = to_clients

    def fail(self, row: int, code: ErrorCode, text: str, retry_after_ms: int = 0) -> None:
        """Fail a request."""
        requests = self._dispatch.requests
        number, client = int(requests.theirs[row]), int(requests.client[row])
        self._to_clients.append((client, RequestFailed(number, code, text, retry_after_ms)))
        self._dispatch.forget(row)

    def end_aborted(self, row: int) -> None:
        """End a request that its client has aborted, and that is at no replica."""
        requests = self._dispatch.requests
        self._to_clients.append((int(requests.client[row]), requests.aborted_rows(row, self.epoch)))
        self._dispatch.forget(row)

    def may_move(self, row: int) -> bool:
        """Return whether a request can continue elsewhere: it has no tokens yet, or would get the same ones there."""
        model = self._membership.model
        return model is None or model.numerics == EXACT or not self._dispatch.requests.num_output(row)

    def free(self, row: int, reason: str) -> None:
        """Let a request that has lost its replica continue elsewhere, or end it."""
        requests = self._dispatch.requests
        if requests.is_aborted(requests.ticket(row)):
            self.end_aborted(row)
        elif self.may_move(row):
            self._dispatch.put(row)
        else:
            assert self._membership.model is not None
            text = (
                f"{reason}, and at numerics level {self._membership.model.numerics} another replica may give other "
                "tokens"
            )
            self.fail(row, ErrorCode.INTERNAL, text)

    def move(self, rows: list[int]) -> None:
        """Take requests away from their replicas, so that they continue elsewhere."""
        requests = self._dispatch.requests
        self._dispatch.withdraw(rows)
        for row in rows:
            if requests.is_aborted(requests.ticket(row)):
                self.end_aborted(row)
            else:
                self._dispatch.put(row)

    def place(self, now: float) -> None:
        """Place waiting requests as long as replicas take them."""
        for row, num_bytes in self._dispatch.place_waiting(now):
            text = f"the request has become too long to continue elsewhere ({num_bytes} bytes)"
            self.fail(row, ErrorCode.RESOURCE_EXHAUSTED, text)
