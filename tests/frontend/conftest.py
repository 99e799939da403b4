"""An in-process transport that plays the engine for the client's tests."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from ipc.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    AddRequest,
    CallDone,
    ClientMessage,
    FinishReason,
    GetStatistics,
    GetTokenizer,
    Hello,
    Limits,
    Outputs,
    ResetPrefixCache,
    ServerMessage,
    Statistics,
    TokenizerFiles,
    Welcome,
    decode_client_message,
    encode,
)

WELCOME = Welcome(
    PROTOCOL_MAJOR, PROTOCOL_MINOR, "0", "engine", 1, b"t" * 16, "played", "", "", "L2", 1000, Limits(64, 4, 100_000)
)


class PlayedEngine:
    """Answers Hello and the typed calls; outputs are what a test feeds it. `answers` replaces the answer to a type."""

    def __init__(self) -> None:
        self.welcome = WELCOME
        self.received: list[ClientMessage] = []
        self.answers: dict[type, Callable[[ClientMessage], ServerMessage | None]] = {
            Hello: lambda _: self.welcome,
            GetStatistics: lambda message: Statistics(message.call, *range(1, 17)),
            GetTokenizer: lambda message: TokenizerFiles(message.call, "", {}),
            ResetPrefixCache: lambda message: CallDone(message.call),
        }
        self.closed = False
        self._lock = threading.Lock()

    def start(
        self,
        on_frames: Callable[[list[bytes]], None],
        on_dead: Callable[[str], None],
        on_lost: Callable[[], bytes],
    ) -> None:
        self._on_frames, self.die, self._on_lost = on_frames, on_dead, on_lost

    def keep_alive(self, frame: bytes, seconds: float) -> None:
        self.heartbeat_s = seconds

    def send(self, frame: bytes) -> None:
        message = decode_client_message(frame)
        with self._lock:
            self.received.append(message)
        answer = self.answers.get(type(message), lambda _: None)(message)
        if answer is not None:
            self.give(answer)

    def close(self) -> None:
        self.closed = True

    def cut(self) -> None:
        """The connection is lost and made again at once."""
        self.send(self._on_lost())

    def give(self, *messages: ServerMessage) -> None:
        """One received batch."""
        self._on_frames([encode(message) for message in messages])

    def feed(self, number: int, position: int, tokens: list[int], finish: int = FinishReason.NONE) -> None:
        self.give(output(number, position, tokens, finish))

    def sent(self, kind: type) -> list[ClientMessage]:
        return [message for message in self.received if type(message) is kind]

    def prompts(self) -> list[list[int]]:
        return [np.frombuffer(request.prompt_token_ids, "<i4").tolist() for request in self.sent(AddRequest)]


def output(number: int, position: int, tokens: list[int], finish: int = FinishReason.NONE, epoch: int = 1) -> Outputs:
    """A row of one request."""
    return Outputs(
        epoch=epoch,
        step=0,
        numbers=np.array([number], "<u4").tobytes(),
        positions=np.array([position], "<u4").tobytes(),
        counts=np.array([len(tokens)], "<u2").tobytes(),
        tokens=np.array(tokens, "<i4").tobytes(),
        finish=bytes([finish]) if finish else b"",
    )


@pytest.fixture
def played_engine() -> PlayedEngine:
    return PlayedEngine()


@pytest.fixture
def played_connection(played_engine: PlayedEngine, monkeypatch: pytest.MonkeyPatch) -> PlayedEngine:
    """What LLM(connect=...) and AsyncLLM(connect=...) find at any address."""
    monkeypatch.setattr("frontend.session.ZmqTransport", lambda address: played_engine)
    return played_engine
