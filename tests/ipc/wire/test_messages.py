"""The wire: every message survives it, fields may be appended, and no bytes do more than raise one typed error."""

import random
from contextlib import nullcontext, suppress
from typing import get_args

import msgspec
import pytest

from ipc.errors import MalformedMessageError
from ipc.options.config import EngineConfig
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.tables.columns import unpack_numbers
from ipc.wire import messages
from ipc.wire.feature_messages import FeatureLimits, FeatureUse, PutFeature
from ipc.wire.fleet_messages import ChangeReplica, GetReplicas, ReplicaChange, ReplicaList, ReplicaStatus
from ipc.wire.kv_events import KVBlocksCleared, KVBlocksRemoved, KVBlocksStored
from ipc.wire.lora_messages import AdapterId, ListLora, LoadLora, LoraAdapter, LoraAdapters, UnloadLora
from ipc.wire.messages import (
    Abort,
    AddRequest,
    Arithmetic,
    BeginDrain,
    CallDone,
    CallFailed,
    ClientMessage,
    EngineStopping,
    ErrorCode,
    GetModelInformation,
    GetStatistics,
    GetTokenizer,
    Goodbye,
    Heartbeat,
    Hello,
    Limits,
    Logprobs,
    ModelDescription,
    ModelInformation,
    Outputs,
    Pause,
    PauseMode,
    Refused,
    RequestFailed,
    ResetPrefixCache,
    Resume,
    ServerMessage,
    Shutdown,
    Statistics,
    TokenizerFiles,
    Welcome,
    decode_client_message,
    decode_server_message,
    encode,
)
from ipc.wire.metrics_messages import GetMetrics, Histogram, Metrics
from ipc.wire.pin_messages import ForkPin, GetPins, Pin, PinAnswer, PinList, Pinned, PinState, ReleasePin
from ipc.wire.pooling_messages import AddPooling, Pooled
from ipc.wire.scheduling_messages import (
    Explain,
    Explanation,
    FollowKVEvents,
    KVEvents,
    Reason,
    RequestEvents,
    RequestExplanation,
    SchedulingState,
    StopRequest,
    UnfollowKVEvents,
)
from ipc.wire.start_messages import (
    Drain,
    Isolate,
    OwnerMessage,
    Prepare,
    Prepared,
    Ready,
    Start,
    StartFailed,
    StartPhase,
    StartReport,
)
from ipc.wire.weights_messages import GetWeights, Sleep, UpdateMode, UpdateWeights, WakeUp, Weights, WeightsMark
from tests.columns import pack_numbers

PARAMS = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    seed=-1,
    stop=["stop", "\u2603"],
    stop_token_ids=[0, 2**31 - 1],
    max_tokens=None,
    min_tokens=3,
    output_kind=RequestOutputKind.DELTA,
    presence_penalty=0.5,
    repetition_penalty=1.25,
    logit_bias={7: -3.5},
    allowed_token_ids=[1, 7],
    bad_words=["bad"],
    bad_words_token_ids=[[3], [5, 6]],
)
CONSTRAINT = StructuredOutputsParams(json='{"type":"object"}', disable_any_whitespace=True)
CLIENT_MESSAGES: list[msgspec.Struct] = [
    Hello(1, 0, "näme"),
    AddRequest(2**32 - 1, b"\1\0\0\0", PARAMS, 2**64 - 1, -5, 1000, "salt", [b"", b"\2\0\0\0"], "tenant"),
    AddRequest(0, b"\1\0\0\0", SamplingParams(), 0),
    AddRequest(1, b"\1\0\0\0", SamplingParams(structured_outputs=CONSTRAINT), 0),
    AddPooling(7, b"\1\0\0\0", PoolingParams(task="embed", dimensions=8), -5, 1000, "salt", "tenant"),
    AddRequest(2, b"\1\0\0\0", SamplingParams(), 0, adapter=AdapterId("ab" * 16), features=[FeatureUse(0, 1, b"d")]),
    AddPooling(8, b"\1\0\0\0", PoolingParams(task="embed"), adapter=AdapterId("ab" * 16)),
    AddPooling(9, b"\1\0\0\0", PoolingParams(task="embed"), features=[FeatureUse(0, 1, b"d")]),
    PutFeature("embeds", [1, 2], b"\0\0\x80?\0\0\0@"),
    Abort(pack_numbers([0, 7, 2**32 - 1])),
    Abort(pack_numbers([7]), b"\1\0"),
    Goodbye(),
    GetTokenizer(1),
    GetStatistics(2),
    ResetPrefixCache(3),
    Heartbeat(),
    GetModelInformation(4),
    Pause(5, PauseMode.ALL),
    Resume(6),
    BeginDrain(7),
    BeginDrain(8, 2500, True),
    Hello(1, 4, "back", b"s" * 16, b"o" * 16, 7),
    Shutdown(8),
    Explain(9),
    Explain(10, 2**32 - 1, 7, 5),
    FollowKVEvents(11),
    UnfollowKVEvents(12),
    GetMetrics(13),
    StopRequest(14, 7, 2**32 - 1),
    LoadLora(15, "sql", "/models/sql"),
    UnloadLora(16, "sql"),
    ListLora(17),
    UpdateWeights(34, "/data/step-3", UpdateMode.KEEP),
    GetWeights(35),
    Sleep(36, 2),
    WakeUp(37),
    GetReplicas(18),
    ChangeReplica(19, ReplicaChange.LEAVE, "tcp://127.0.0.1:5555", 20_000),
    AddRequest(3, b"\1\0\0\0", SamplingParams(), 0, pins=(Pin("session", 300_000, 1, is_required=True), Pin("", 1))),
    ReleasePin(42, "session", "tenant"),
    ForkPin(43, "session", "other", 1000),
    GetPins(44, "tenant"),
]
EXPLAINED = RequestExplanation(7, 1, 0, SchedulingState.WAITING, Reason.NO_BLOCKS, *range(17))
SERVER_MESSAGES: list[msgspec.Struct] = [
    Welcome(1, 0, "0.1.0", "id", 3, bytes(16), "model", "ab", "cd", "L2", 49_152, Limits(8192, 32, 2**23)),
    Welcome(1, 1, "", "", 0, b"", "", "", "", "L0", 4, Limits(8, 1, 2**20, 3, 4, 5, 6, 7, 20)),
    Welcome(1, 3, "", "", 0, b"", "", "", "", "L2", 4, Limits(8, 1, 9), {"temperature": 0.5, "top_k": 3}),
    Welcome(1, 4, "", "", 0, b"", "", "", "", "L2", 4, Limits(8, 1, 9, 0, 0, 0, 0, 0, -1, 60_000)),
    Welcome(1, 4, "", "", 0, b"", "", "", "", "L2", 4, Limits(8, 1, 9), tasks={"a": 3}, features=FeatureLimits(5, 9)),
    Welcome(
        *(1, 0, "", "", 0, b"", "", "", "", "L2", 4, Limits(8, 1, 9)),
        description=ModelDescription("gguf", "llama", 134_515_008, "Q4_1", 98_000_000, ["no", "yes"]),
    ),
    Refused(ErrorCode.VERSION_MISMATCH, "why"),
    Outputs(0, 1, b"\1\0\0\0", b"\0\0\0\0", b"\1\0", b"\5\0\0\0"),
    Outputs(1, 2**40, b"\1\0\0\0", b"\0\0\0\0", b"\1\0", b"\5\0\0\0", b"\0\0", b"\1", [(0, 5)], bytes(8)),
    Outputs(0, 1, b"", b"", b"", b"", logprobs=Logprobs(b"n", b"p", b"c", b"r", b"t", b"v", b"h")),
    RequestFailed(9, ErrorCode.INTERNAL, "why"),
    TokenizerFiles(1, "hash", {"tokenizer.json": b"{}", "": b""}),
    Statistics(1, *range(16)),
    CallDone(1),
    CallFailed(1, ErrorCode.UNAVAILABLE, "why"),
    ModelInformation(1, "model", "ab", "L2", "local", "float32", 49_152, [2], 8192, 32, 512, 1000, 16, True),
    EngineStopping(),
    EngineStopping("why"),
    EngineStopping("", True),
    Statistics(1, *range(32), [1, 2], 33, 34, 35, [3, 2]),
    Statistics(1, *range(32), [1, 2], 33, 34, 35, [3, 2], 36),
    Weights(34, WeightsMark(3, "ab", "cd", "c-avx512"), True, False),
    LoraAdapters(1, [LoraAdapter("sql", "ab" * 16, 8, 2**20, "/models/sql")]),
    LoraAdapters(1, [], False),
    Outputs(0, 1, b"\1\0\0\0", b"\0\0\0\0", b"\1\0", b"\5\0\0\0", finish=b"\1", drafts=bytes(16)),
    Outputs(0, 1, b"\1\0\0\0", bytes(4), bytes(2), b"", finish=b"\1", pooled=Pooled(b"n", b"c", b"w", b"v")),
    Outputs(0, 1, b"", b"", b"", b"", events=RequestEvents(b"n", b"c", b"k", b"u", b"a", b"t")),
    KVEvents(0, 5, 3, [KVBlocksCleared(), KVBlocksStored(b"c", b"p", b"t", 16), KVBlocksRemoved(b"c")], True),
    Explanation(1, 2, 3, 4, "fcfs", *range(16), [EXPLAINED], 9),
    Statistics(1, *range(32), [1, 2]),
    Metrics(1, False),
    Metrics(1, True, {"a_seconds": Histogram([0.5, 1.0], [1, 0, 2], 7.5)}, {"stop": 3}, {"UNAVAILABLE": 1}, 2),
    ReplicaList(1, [], 0, 0),
    ReplicaList(2, [ReplicaStatus("ipc:///a", "lost", "why", "id", 3, 4, 5, 6)], 7, 8),
    Welcome(1, 0, "", "", 0, b"", "", "", "", "L2", 4, Limits(8, 1, 9), arithmetic=Arithmetic("w", "d", "v", "avx2")),
    Pinned(3, [PinAnswer(16, 0), PinAnswer(0, 32, "why")]),
    PinList(1, [PinState("session", 48, 32, 299_000)], 48, 1024, 2),
]
OWNER_MESSAGES: list[msgspec.Struct] = [
    Start(EngineConfig(model="m", threads=2), "ipc:///x", 3, b"owner", True),
    Drain(),
    Isolate([b"p" * 16], [b"q" * 16]),
    Prepare(EngineConfig(model="m", threads=2), True),
]
START_REPORTS: list[msgspec.Struct] = [
    StartPhase("load", 0.5),
    Ready("ipc:///x", 1.5),
    StartFailed("ConfigError", "why"),
    Prepared(0.7),
]


def test_samples_cover_every_message() -> None:
    samples = {
        ClientMessage: CLIENT_MESSAGES,
        ServerMessage: SERVER_MESSAGES,
        OwnerMessage: OWNER_MESSAGES,
        StartReport: START_REPORTS,
    }
    for union, instances in samples.items():
        assert {type(message) for message in instances} == set(get_args(union))
    tags = [kind.__struct_config__.tag for union in samples for kind in get_args(union)]
    assert len(tags) == len(set(tags)), "a tag names two messages"


@pytest.mark.parametrize("message", CLIENT_MESSAGES, ids=lambda message: type(message).__name__)
def test_client_messages_round_trip(message: msgspec.Struct) -> None:
    assert decode_client_message(encode(message)) == message
    assert decode_client_message(memoryview(encode(message))) == message
    with pytest.raises(MalformedMessageError, match="not a server message"):
        decode_server_message(encode(message))


@pytest.mark.parametrize("message", SERVER_MESSAGES, ids=lambda message: type(message).__name__)
def test_server_messages_round_trip(message: msgspec.Struct) -> None:
    assert decode_server_message(encode(message)) == message
    with pytest.raises(MalformedMessageError, match="not a client message"):
        decode_client_message(encode(message))


@pytest.mark.parametrize("message", [*OWNER_MESSAGES, *START_REPORTS], ids=lambda message: type(message).__name__)
def test_pipe_messages_round_trip(message: msgspec.Struct) -> None:
    union = OwnerMessage if message in OWNER_MESSAGES else StartReport
    assert msgspec.msgpack.decode(encode(message), type=union) == message
    for decode in (decode_client_message, decode_server_message):
        with pytest.raises(MalformedMessageError):
            decode(encode(message))


def test_a_message_is_one_array_that_begins_with_its_tag() -> None:
    """The wire's fixed points; a change of one of these is another protocol major."""
    assert encode(Goodbye()) == b"\x91\x04"
    assert encode(Abort(pack_numbers([258]))) == b"\x93\x03\xc4\x04\x02\x01\x00\x00\xc4\x00"
    assert encode(CallDone(5)) == b"\x92\x52\x05"
    assert encode(Hello(1, 0, "x")) == b"\x97\x01\x01\x00\xa1x\xc4\x00\xc4\x00\x00"
    assert decode_client_message(b"\x94\x01\x01\x00\xa1x") == Hello(1, 0, "x")


def test_fields_of_a_later_minor_are_ignored_and_missing_optional_ones_filled() -> None:
    raw = msgspec.msgpack.decode(encode(Outputs(0, 1, b"", b"", b"", b"", b"c", b"f", [(0, 1)], b"s", None)))
    later = msgspec.msgpack.encode([*raw, "new field", {"a": [1]}])
    assert decode_server_message(later) == msgspec.msgpack.decode(later, type=Outputs)
    assert decode_server_message(msgspec.msgpack.encode(raw[:7])) == Outputs(0, 1, b"", b"", b"", b"")
    with pytest.raises(MalformedMessageError, match="length"):
        decode_server_message(msgspec.msgpack.encode(raw[:6]))


def test_parameters_may_end_early() -> None:
    """A client may leave out the last fields of SamplingParams, as one of an earlier minor does."""
    raw = msgspec.msgpack.decode(encode(CLIENT_MESSAGES[1]))
    assert SamplingParams.__struct_fields__[28] == "bad_words_token_ids"
    raw[3] = raw[3][:28]
    decoded = decode_client_message(msgspec.msgpack.encode(raw))
    assert isinstance(decoded, AddRequest)
    assert decoded.params == msgspec.structs.replace(PARAMS, bad_words_token_ids=None)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "truncated"),
        (b"\xc0", "Expected `array`"),
        (b"\x90", "length"),
        (b"\x91\x7f", "Invalid value 127"),
        (b"\x91\xa1x", "Expected `int`"),
        (b"\x91\x04\x00", "trailing"),
        (b"\x92\x03\xa4abcd", "Expected `bytes`"),
        (b"\x94\x01\x01\x00\xa1\xff", "(utf|UTF)-8"),  # msgspec before 0.23, and since
        (b"\x94\x01\xcb\x3f\xf8\0\0\0\0\0\0\x00\xa1x", "Expected `int`"),
        (b"\x94\x01\x01\x00\xdb\xff\xff\xff\xff", "truncated"),
        (b"\xdd\xff\xff\xff\xff\x04", "truncated"),
    ],
)
def test_errors_say_what_is_wrong(frame: bytes, reason: str) -> None:
    with pytest.raises(MalformedMessageError, match=f"^not a client message: .*{reason}"):
        decode_client_message(frame)


@pytest.mark.parametrize("position", range(3, len(SamplingParams.__struct_fields__)))
def test_a_wrong_type_in_any_parameter_is_a_malformed_message(position: int) -> None:
    raw = msgspec.msgpack.decode(encode(CLIENT_MESSAGES[1]))
    raw[3][position] = {"a": "mapping"}
    with pytest.raises(MalformedMessageError, match=r"\$\[3\]"):
        decode_client_message(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("temperature", -1.0, "temperature must be in"),
        ("temperature", float("nan"), "temperature must be in"),
        ("top_p", 0.0, "top_p must be in"),
        ("top_k", -2, "top_k must be in"),
        ("min_p", float("inf"), "min_p must be in"),
        ("max_tokens", 0, "max_tokens must be in"),
        ("min_tokens", -1, "min_tokens must be in"),
        ("seed", 0.5, "Expected `int"),
        ("stop", ["x"] * 17, "Expected `array` of length <= 16"),
        ("stop_token_ids", [-1], "stop_token_ids must be"),
        ("n", 129, "n must be in"),
        ("n", 1.5, "Expected `int`"),
        ("logprobs", 2**31, "logprobs must be in"),
        ("prompt_logprobs", -2, "prompt_logprobs must be in"),
        ("logit_bias", {-1: 0.5}, "a token id in logit_bias must be in"),
        ("logit_bias", {1: "x"}, "Expected `float`"),
        ("allowed_token_ids", [], "at least one token id"),
        ("bad_words", [""], "a bad word has 1 to"),
        ("bad_words_token_ids", [[]], "a bad word has 1 to"),
        ("repetition_penalty", 0.0, "repetition_penalty must be in"),
        ("presence_penalty", 2.5, "presence_penalty must be in"),
        ("extra_args", 1, "Expected `null`"),
        ("output_kind", 9, "Invalid enum value 9"),
    ],
)
def test_bad_parameters_are_refused_again_when_decoded(name: str, value: object, reason: str) -> None:
    raw = msgspec.msgpack.decode(encode(CLIENT_MESSAGES[2]))
    raw[3][SamplingParams.__struct_fields__.index(name)] = value
    with pytest.raises(MalformedMessageError, match=reason):
        decode_client_message(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize("depth", [10, 1000, 100_000, 2_000_000])
@pytest.mark.parametrize("nest", [b"\x91", b"\x81\x01"], ids=["arrays", "maps"])
def test_deep_nesting(depth: int, nest: bytes) -> None:
    """A field of some later minor is skipped where the stack is deep enough for it: Python 3.11 to 3.14 differ."""
    later = b"\x92\x04" + nest * depth + b"\xc0"
    with nullcontext() if depth == 10 else suppress(MalformedMessageError):
        assert decode_client_message(later) == Goodbye()
    with pytest.raises(MalformedMessageError):
        decode_server_message(later)
    for frame in (nest * depth, b"\x92\x04" + nest * depth, b"\x94\x42\0\0" + nest * depth):
        for decode in (decode_client_message, decode_server_message):
            with pytest.raises(MalformedMessageError):
                decode(frame)


def test_announced_lengths_allocate_nothing() -> None:
    """Four billion entries or bytes are announced wherever a list, a map or bytes may stand."""
    add, tokenizer = encode(AddRequest(1, b"", SamplingParams(), 3)), encode(TokenizerFiles(1, "h", {}))
    for header in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"):
        for frame in (add, tokenizer):
            decode = decode_client_message if frame is add else decode_server_message
            for at in range(len(frame)):
                with pytest.raises(MalformedMessageError):
                    decode(frame[:at] + header + b"\xff\xff\xff\xff" + frame[at + 1 :][:8])


#: Bytes with which msgpack values begin.
_HEADERS = bytes(range(0x80, 0xE0)) + b"\x00\x7f\xff"


def mutate(rng: random.Random, frames: list[bytes]) -> bytes:
    frame = bytearray(rng.choice(frames))
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randrange(40))
    if kind == 1:
        return bytes(frame[: rng.randrange(len(frame))])
    if kind == 2:
        other = rng.choice(frames)
        return bytes(frame[: rng.randrange(len(frame))]) + other[rng.randrange(len(other)) :]
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(frame))
        if kind == 3:
            frame[at] ^= 1 << rng.randrange(8)
        elif kind == 4:
            frame[at] = rng.choice(_HEADERS)
        else:
            frame[at:at] = bytes([rng.choice(_HEADERS)]) + rng.randbytes(rng.randrange(5))
    return bytes(frame)


@pytest.mark.parametrize("count", [100_000, pytest.param(3_000_000, marks=pytest.mark.soak)])
def test_hostile_frames_raise_only_malformed_message_error(count: int) -> None:
    rng = random.Random(count)
    frames = [encode(message) for message in (*CLIENT_MESSAGES, *SERVER_MESSAGES)]
    decoders = {"client": decode_client_message, "server": decode_server_message}
    outcomes = dict.fromkeys((*decoders, "not a client message", "not a server message"), 0)
    for _ in range(count):
        frame = mutate(rng, frames)
        for name, decode in decoders.items():
            try:
                message = decode(frame)
            except MalformedMessageError as error:
                outcomes[str(error).partition(":")[0]] += 1
            else:
                again = encode(message)
                assert encode(decode(again)) == again  # as bytes: a bound of a histogram may be nan
                outcomes[name] += 1
    assert sum(outcomes.values()) == 2 * count
    assert min(outcomes.values()) > 500, outcomes  # the mutations reach behind the first byte


def test_numbers_columns() -> None:
    numbers = [0, 1, 2**31, 2**32 - 1]
    assert unpack_numbers(pack_numbers(numbers)) == numbers
    assert unpack_numbers(pack_numbers([])) == []
    assert unpack_numbers(pack_numbers(numbers)[:-1]) == numbers[:-1]
    with pytest.raises(OverflowError):
        pack_numbers([2**32])


def test_protocol_version_is_announced() -> None:
    refused = Refused(ErrorCode.VERSION_MISMATCH, "")
    assert (refused.major, refused.minor) == (messages.PROTOCOL_MAJOR, messages.PROTOCOL_MINOR)
