"""Witness: checks what an engine says on each connection, before the network can change it."""

from ipc.wire.messages import (
    AddRequest,
    ErrorCode,
    Outputs,
    RequestFailed,
    decode_client_message,
    decode_server_message,
)
from tests.core.driving import unpack
from tests.simulation.world import Failure

_Key = tuple[bytes, int, int]  # identity, number, choice


class Witness:
    """The rules of an engine's answers: on a connection the tokens of each choice follow one another from the delivered
    ones on, and nothing follows the end of a request."""

    def __init__(self) -> None:
        self._next: dict[_Key, int] = {}  # position; -1: it has ended
        self.num_resumed = 0  # requests that came with tokens

    def hear(self, identity: bytes, frame: bytes) -> None:
        """Note a frame that the engine reads."""
        message = decode_client_message(frame)
        if not isinstance(message, AddRequest):
            return
        self.num_resumed += any(message.delivered)
        for choice in range(message.params.n):
            delivered = message.delivered[choice] if choice < len(message.delivered) else b""
            self._next.setdefault((identity, message.number, choice), len(delivered) // 4)

    def say(self, identity: bytes, frame: bytes) -> None:
        """Check a frame that the engine sends. Errors: Failure."""
        message = decode_server_message(frame)
        if isinstance(message, RequestFailed) and message.code != ErrorCode.ALREADY_EXISTS:
            choice = 0
            while (key := (identity, message.number, choice)) in self._next:
                self._next[key] = -1
                choice += 1
        elif isinstance(message, Outputs) and message.numbers:
            self._say_outputs(identity, message)

    def _say_outputs(self, identity: bytes, message: Outputs) -> None:
        choices = message.choices or bytes(2 * len(message.numbers))
        for row, (number, position, tokens, finish) in enumerate(unpack(message)):
            key = (identity, number, int.from_bytes(choices[2 * row : 2 * row + 2], "little"))
            due = self._next.get(key)
            if due is None:
                raise Failure(f"the engine answers request {key}, which was not sent on this connection")
            if position != due:
                raise Failure(f"the engine sends {key} from position {position} on; {due} is due (-1: it has ended)")
            self._next[key] = -1 if finish else due + len(tokens)
