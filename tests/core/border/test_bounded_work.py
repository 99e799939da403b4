"""What one client can make the engine do at once: counted in frames, messages and steps, not in time."""

import struct
import sys
import tracemalloc
from collections import deque

import msgspec
import numpy as np
import pytest
import zmq

from core.border.accounts import load_of
from core.border.inbox import MAX_ABORTED_AT_ONCE, WORK_PER_STEP, Inbox
from core.border.socket_rounds import Border
from core.engine import EngineCore
from core.executors.fake import create
from core.inputs import EngineInput
from core.scheduling.ends import MAX_OVERDUE
from ipc.errors import MalformedMessageError
from ipc.params.sampling_params import SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    AddRequest,
    FinishReason,
    Goodbye,
    Hello,
    Outputs,
    Refused,
    RequestFailed,
    decode_client_message,
    decode_server_message,
    encode,
)
from ipc.wire.scheduling_messages import Explain, Explanation
from tests.columns import pack_numbers
from tests.core.driving import add_message, small_config, unpack
from tests.core.running_engine import CONFIG
from tests.fake_options import fake_options
from tests.raw_client import request
from tests.simulation.engine_parts import ready_executor, served

# --- decoding ----------------------------------------------------------------------------------------------------


DENSE = 1 << 20  # entries of a hostile list: a few megabytes of it are a long pause


def dense(entry: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", DENSE) + entry * DENSE


def in_request(field: str, value: bytes) -> bytes:
    """A request with these bytes in a field of AddRequest."""
    fields = msgspec.msgpack.decode(encode(request(1, [1])))
    place = AddRequest.__struct_fields__.index(field) + 1
    defaults = [0, 0, "", [], "", None, []]  # from priority on
    parts = [msgspec.msgpack.encode(one) for one in [*fields[:5], *defaults][:place]]
    rest = b"\x00" if field == "params" else b""  # the seed
    return bytes([0x90 + len(parts) + 1 + len(rest)]) + b"".join(parts) + value + rest


def in_structure(field: str, value: bytes) -> bytes:
    """A request with these bytes in a field of its grammar."""
    names = SamplingParams.__struct_fields__
    place, inner = names.index("structured_outputs"), StructuredOutputsParams.__struct_fields__.index(field)
    defaults = b"".join(msgspec.msgpack.encode(getattr(SamplingParams(), name)) for name in names[:place])
    grammar = bytes([0x90 + inner + 1]) + b"\xc0" * inner + value
    return in_request("params", b"\xdc" + struct.pack(">H", place + 1) + defaults + grammar)


HOSTILE = {
    "delivered": in_request("delivered", dense(b"\xc4\x00")),
    "features": in_request("features", dense(b"\x93\x00\x01\xc4\x00")),
    "shape": b"\x94\x07\xa1x" + dense(b"\x01") + b"\xc4\x00",
    "choice": in_structure("choice", dense(b"\xa0")),
    "json": in_structure("json", b"\x81\xa1a" + dense(b"\x01")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_other_list_is_made_either(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessageError, match="of length <="):
            decode_client_message(HOSTILE[name])
        assert tracemalloc.get_traced_memory()[1] < DENSE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "allowed_token_ids", "bad_words", "bad_words_token_ids"])
def test_a_list_that_is_too_long_is_not_made(name: str) -> None:
    fields = msgspec.msgpack.decode(encode(request(1, [1])))
    position = SamplingParams.__struct_fields__.index(name)
    defaults = [getattr(SamplingParams(), one) for one in SamplingParams.__struct_fields__]
    head = b"".join(msgspec.msgpack.encode(value) for value in defaults[:position])
    parts = [msgspec.msgpack.encode(field) for field in fields]
    count = 1 << 20
    dense = b"\xdd" + struct.pack(">I", count) + bytes([1]) * count
    parts[3] = b"\xdc" + struct.pack(">H", position + 1) + head + dense
    frame = bytes([0x90 + len(parts)]) + b"".join(parts)
    tracemalloc.start()
    with pytest.raises(MalformedMessageError, match="of length <="):
        decode_client_message(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < count, "a list of these would take 8 bytes for each"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={300 + token: 0.5 + token for token in range(60)}),
        SamplingParams(logit_bias=dict.fromkeys(range(1000, 31_000), 1.25)),
        SamplingParams(allowed_token_ids=list(range(1000, 101_000))),
        SamplingParams(bad_words_token_ids=[[1000 + n, *range(2000, 2060)] for n in range(500)]),
        SamplingParams(stop_token_ids=list(range(1000, 2000)), n=1),
    ],
)
def test_what_a_request_keeps_is_counted(params: SamplingParams) -> None:
    frame = encode(AddRequest(1, b"\0" * 4000, params, seed=0))
    tracemalloc.start()
    kept = decode_client_message(frame)
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert isinstance(kept, AddRequest)
    assert num_bytes <= load_of(kept, len(frame)).num_bytes <= 4 * num_bytes + 20_000
    assert sys.getsizeof(kept.prompt_token_ids) > 4000


# --- a round at the socket ---------------------------------------------------------------------------------------


class PlayedFrame:
    """One frame of a message."""

    def __init__(self, data: bytes, *, more: bool) -> None:
        self.buffer, self.more = data, more

    def get(self, option: int) -> int:
        return 5


class PlayedSocket:
    """The socket and its monitor, with messages of one peer; what is sent is kept."""

    def __init__(self) -> None:
        self.frames: deque[tuple[bytes, bool]] = deque()
        self.sent: list[bytes] = []
        self.is_inside = False  # a message of which the identity was read

    def put(self, *parts: bytes) -> None:
        self.frames.extend((part, index < len(parts) - 1) for index, part in enumerate(parts))

    def recv(self, flags: int = 0, copy: bool = True) -> bytes | PlayedFrame:
        if copy:
            assert not self.is_inside, "the identity comes before a message, and once"
            if not self.frames:
                raise zmq.Again
            self.is_inside = True
            return b"peer"
        data, more = self.frames.popleft()
        self.is_inside = more
        return PlayedFrame(data, more=more)

    def send(self, data: bytes, flags: int) -> None:
        if not flags & zmq.SNDMORE:
            self.sent.append(data)

    def get(self, option: int) -> int:
        return zmq.POLLIN if self.frames else 0

    def poll(self, timeout: int) -> int:
        return 0


@pytest.fixture
def socket() -> PlayedSocket:
    return PlayedSocket()


@pytest.fixture
def border(socket: PlayedSocket) -> Border:
    info = ready_executor(CONFIG).info
    parts = (socket, socket, served(CONFIG, info, 0, 60_000), 0.0)
    border = Border(*parts, on_drain=lambda: None, on_shutdown=lambda: None)  # type: ignore[arg-type]
    socket.put(encode(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "")))
    assert border.receive(0.0)
    socket.sent.clear()
    return border


def test_a_message_of_many_frames_is_read_in_many_rounds(socket: PlayedSocket, border: Border) -> None:
    socket.put(*[b"x"] * 5000)
    socket.put(encode(request(1, [1])))
    num_left = []
    while not border.receive(0.0):
        num_left.append(len(socket.frames))
    assert num_left == [5000 - 1024 * rounds for rounds in range(1, 5)]
    (refused,) = [decode_server_message(frame) for frame in socket.sent]
    assert isinstance(refused, Refused)
    assert refused.message == "a message must be one frame, this one has 5000"
    assert border.inbox.drain() == [(1, request(1, [1]))]


def test_few_long_messages_fill_a_round(socket: PlayedSocket, border: Border) -> None:
    for number in range(4):
        socket.put(encode(request(number, [1] * 7000)))  # 27 KiB
    for first in (0, 2):
        assert not border.receive(0.0)
        numbers = [message.number for _, message in border.inbox.drain() if isinstance(message, AddRequest)]
        assert numbers == [first, first + 1]


# --- the inbox and the step --------------------------------------------------------------------------------------


def test_the_engine_takes_in_a_bounded_amount_of_work_in_order() -> None:
    inbox = Inbox()
    messages: list[EngineInput] = [request(number, [1]) for number in range(2 * WORK_PER_STEP)]
    messages[10:10] = [Explain(1, -1, 0, 1000), Explain(2, 7)]
    for message in messages:
        inbox.put(1, message)
    inbox.put_abort(1, Abort(pack_numbers(list(range(5000))), np.arange(5000, dtype="<u2").tobytes()))
    inbox.put_end()
    parts = []
    while not inbox.has_ended:
        parts.append([message for _, message in inbox.drain()])
    taken = [message for part in parts for message in part]
    assert taken[: len(messages)] == messages
    aborts = taken[len(messages) :]
    assert all(isinstance(abort, Abort) and len(abort.numbers) <= 4 * MAX_ABORTED_AT_ONCE for abort in aborts)
    numbers = b"".join(abort.numbers for abort in aborts if isinstance(abort, Abort))
    choices = b"".join(abort.choices for abort in aborts if isinstance(abort, Abort))
    assert np.frombuffer(numbers, "<u4").tolist() == np.frombuffer(choices, "<u2").tolist() == list(range(5000))
    assert [sum(isinstance(one, Explain) for one in part) for part in parts][:3] == [1, 1, 0]
    assert max(sum(isinstance(one, AddRequest) for one in part) for part in parts) <= WORK_PER_STEP
    assert inbox.is_empty
    assert inbox.num_queued_requests == 2 * WORK_PER_STEP


def test_a_long_step_lets_more_in() -> None:
    """What follows one caller's 4,096 choices does not wait for 32 steps if each takes seconds."""
    inbox = Inbox()
    for number in range(4096):
        inbox.put(1, request(number, [1]))
    counts = []
    for step_ns in (0, 15_000_000, 82_000_000, 640_000_000, 10_000_000_000, 0):
        counts.append(len(inbox.drain()))
        inbox.settle(0, 0, step_ns)
    assert counts == [128, 128, 128, 128, 1000, 4096 - 1512]


def test_long_parameters_are_work() -> None:
    inbox, num_steps = Inbox(), 0
    long = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(1024), 1.0))
    for number in range(2 * WORK_PER_STEP):
        inbox.put(1, AddRequest(number, request(number, [1]).prompt_token_ids, long, 0))
    while len(inbox.drain()):
        num_steps += 1
    assert num_steps >= 2 * (1 + 1024 // 256)


def test_a_session_with_many_requests_ends_in_parts(socket: PlayedSocket, border: Border) -> None:
    for number in range(3000):
        socket.put(encode(request(number, [1])))
    socket.put(encode(Goodbye()))
    while not border.receive(0.0):
        pass
    messages: list[EngineInput] = []
    while part := border.inbox.drain():
        messages += [message for _, message in part]
    aborts = [message for message in messages if isinstance(message, Abort)]
    assert [len(abort.numbers) // 4 for abort in aborts] == [MAX_ABORTED_AT_ONCE] * 23 + [
        3000 - 23 * MAX_ABORTED_AT_ONCE
    ]
    assert messages[-1] == Goodbye()


class Beside:
    """An engine with a witness stream and a client whose requests wait."""

    def __init__(self, num_waiting: int, deadline_ms: int = 0) -> None:
        config = small_config(
            2000,
            16,
            max_num_seqs=2,
            budget=512,
            max_model_len=16_000,
            executor_options=fake_options(eos_token_id=2**20),
        )
        executor = create(config)
        executor.initialize_cache(config)
        self.engine, self.inbox = EngineCore(config, executor), Inbox()
        self.inbox.put(1, add_message(0, [1], 10_000))
        self.inbox.put(2, add_message(2**31, [1], 10_000))  # takes the other row
        for number in range(num_waiting):
            self.inbox.put(2, add_message(number, [1, number % 900], 10_000, deadline_ms=deadline_ms))
        while not self.inbox.is_empty:
            self.step(0)
        self.num_ended = 0

    def step(self, now_ns: int) -> list[object]:
        """Run one step, in which the witness gets its token; return the messages of the other client."""
        replies = self.engine.step(self.inbox.drain(), now_ns)
        mine = [reply for client, reply in replies if client == 1 and isinstance(reply, Outputs)]
        assert [tokens for reply in mine for number, _, tokens, _ in unpack(reply) if number == 0], "a step without it"
        return [reply for client, reply in replies if client == 2]


def test_a_long_abort_costs_each_step_its_share() -> None:
    beside = Beside(3000)
    beside.inbox.put_abort(2, Abort(pack_numbers(list(range(3000)))))
    ended = []
    while not beside.inbox.is_empty:
        replies = [reply for reply in beside.step(0) if isinstance(reply, Outputs)]
        rows = [row for reply in replies for row in unpack(reply) if row[3] is FinishReason.ABORT]
        assert len(replies) <= 4, "the ends of a step are columns of one message"
        ended.append(len(rows))
    assert sum(ended) == 3000
    assert max(ended) <= 3 * MAX_ABORTED_AT_ONCE
    assert len(beside.engine.scheduler.waiting) == 0


def test_many_deadlines_cost_each_step_its_share() -> None:
    beside = Beside(2 * MAX_OVERDUE + 1, deadline_ms=1)
    counts = [len([one for one in beside.step(10**7) if isinstance(one, RequestFailed)]) for _ in range(4)]
    assert counts == [MAX_OVERDUE, MAX_OVERDUE, 1, 0]


def test_one_explanation_a_step() -> None:
    beside = Beside(300)
    for call in range(5):
        beside.inbox.put(2, Explain(call, -1, 0, 1000))
    for call in range(5):
        (answer,) = [one for one in beside.step(0) if isinstance(one, Explanation)]
        assert answer.call == call
        assert [one.position for one in answer.requests[2:]] == list(range(300))
