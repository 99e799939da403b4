"""What the client's tests speak to: a transport in process that plays the engine, or an engine with made-up tokens."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from frontend.llm import LLM
from frontend.results.outputs import RequestOutput
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import (
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
from tests.fake_options import fake_options
from tests.placed import PREFIX

VOCAB_SIZE = 64

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

    def await_return(self, seconds: float) -> None:
        self.return_s = seconds

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
    monkeypatch.setattr(f"{PREFIX}frontend.session.ZmqTransport", lambda address: played_engine)
    return played_engine


@pytest.fixture
def played_llm(played_connection: PlayedEngine) -> Iterator[LLM]:
    with LLM(connect="ipc:///played") as with_engine:
        yield with_engine


def greedy(max_tokens: int = 8, **arguments: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **arguments)


def ids_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def text_side(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer whose word for token i is "w<i> ", and a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    hf = tokenizers.Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}, unk_token="w0"))
    hf.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hf.decoder = decoders.Replace("w", ".w")
    (folder / "tokenizer.json").write_text(hf.to_str())
    template = (
        "{% for message in messages %}{{ message.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def llm(text_side: Path) -> Iterator[LLM]:
    """One engine for the tests of a module that leave it as it was."""
    engine = LLM(
        executor="fake",
        executor_options=fake_options(vocab_size=VOCAB_SIZE),
        max_num_seqs=8,
        max_logprobs=VOCAB_SIZE,
        tokenizer=text_side,
    )
    with engine:
        yield engine
