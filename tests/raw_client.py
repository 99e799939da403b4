"""RawClient: a client made of nothing but a DEALER socket and the messages, to test the engine's side of the border."""

import time
from types import TracebackType
from typing import TypeVar

import numpy as np
import zmq

from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    AddRequest,
    FinishReason,
    GetStatistics,
    Heartbeat,
    Hello,
    Outputs,
    ServerMessage,
    Statistics,
    Welcome,
    decode_server_message,
    encode,
)
from ipc.wire.sockets import connect_dealer

PATIENCE_S = 60.0  # an engine's start takes half a second of CPU time, and a busy machine gives a 30th of a core
Message = TypeVar("Message", bound=ServerMessage)


class RawClient:
    """Tokens and finish codes by request number, as received."""

    def __init__(self, address: str, *, hello: bool = True) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = connect_dealer(self.context, address)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason] = {}
        self._beat_s = 0.0  # between two heartbeats; 0 = it sends none
        if hello:
            self.send(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "raw"))
            self.welcome = self.receive(Welcome)
            self._beat_s = self.welcome.limits.heartbeat_ms / 1000

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.context.destroy(linger=100)

    def send(self, *messages: object) -> None:
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else encode(message))  # type: ignore[arg-type]

    def add(self, number: int, prompt: list[int], max_tokens: int = 8) -> None:
        self.send(request(number, prompt, max_tokens))

    def receive_any(self, timeout: float = PATIENCE_S) -> ServerMessage:
        """The next message; Outputs are noted before they are returned."""
        assert self.socket.poll(int(timeout * 1000)), f"nothing received within {timeout} s"
        message = decode_server_message(self.socket.recv())
        if isinstance(message, Outputs):
            self._note(message)
        return message

    def receive(self, kind: type[Message], timeout: float = PATIENCE_S) -> Message:
        """The next message of this kind; only Outputs may come before it."""
        while True:
            message = self.receive_any(timeout)
            if isinstance(message, kind):
                return message
            assert isinstance(message, Outputs), message

    def finish(self, *numbers: int) -> list[list[int]]:
        """Tokens of these requests once all have finished. It beats: on a busy machine they may outlast the lease."""
        beaten_at = time.monotonic()
        while not self.finished.keys() >= set(numbers):
            message = self.receive_any()
            assert isinstance(message, Outputs), message
            if self._beat_s and time.monotonic() - beaten_at > self._beat_s:
                self.send(Heartbeat())
                beaten_at = time.monotonic()
        return [self.tokens[number] for number in numbers]

    def statistics(self) -> Statistics:
        self.send(GetStatistics(1))
        return self.receive(Statistics)

    def _note(self, outputs: Outputs) -> None:
        numbers = np.frombuffer(outputs.numbers, "<u4").tolist()
        counts = np.frombuffer(outputs.counts, "<u2").tolist()
        positions = np.frombuffer(outputs.positions, "<u4").tolist()
        finish = np.frombuffer(outputs.finish, np.uint8).tolist() if outputs.finish else [0] * len(numbers)
        tokens = np.frombuffer(outputs.tokens, "<i4").tolist()
        for number, count, position, code in zip(numbers, counts, positions, finish, strict=True):
            have = self.tokens.setdefault(number, [])
            assert position == len(have), (number, position, len(have))
            have += tokens[:count]
            tokens = tokens[count:]
            if code:
                self.finished[number] = FinishReason(code)


def request(number: int, prompt: list[int], max_tokens: int = 8) -> AddRequest:
    """Greedy and of known length."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return AddRequest(number, np.array(prompt, "<i4").tobytes(), params, seed=0)
