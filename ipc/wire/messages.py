"""All messages between a client and the engine core: a tagged Struct each, a union and a decoder per direction.

Wire: one ZeroMQ message = one frame = one msgpack array `[tag, field, ...]`. New fields and messages are appended, with
defaults, and none is removed, so that minors of one major interoperate. Columns are little-endian arrays in `bin`
fields. Token ids are int32; request numbers and positions uint32. There is no untyped field and no extension type.
"""

from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias, Union

import msgspec

from ipc.errors import MalformedMessageError
from ipc.params.sampling_params import Delivered, SamplingParams
from ipc.wire.call import Call, CallRule
from ipc.wire.feature_messages import FeatureLimits, FeatureUses, PutFeature
from ipc.wire.fleet_messages import ChangeReplica, GetReplicas, ReplicaList
from ipc.wire.lora_messages import AdapterId, ListLora, LoadLora, LoraAdapters, UnloadLora
from ipc.wire.metrics_messages import GetMetrics, Metrics
from ipc.wire.pin_messages import ForkPin, GetPins, PinList, Pinned, ReleasePin, RequestPins
from ipc.wire.pooling_messages import AddPooling, Pooled
from ipc.wire.scheduling_messages import (
    Explain,
    Explanation,
    FollowKVEvents,
    KVEvents,
    RequestEvents,
    StopRequest,
    UnfollowKVEvents,
)
from ipc.wire.weights_messages import GetWeights, Sleep, UpdateWeights, WakeUp, Weights, WeightsMark

PROTOCOL_MAJOR = 1
#: A release that appends to the messages below increments it; docs/protocol.md has the promise between minors.
PROTOCOL_MINOR = 0

#: Largest frame that the core accepts, bytes: a prompt of a million tokens and its parameters.
MAX_CLIENT_MESSAGE_BYTES = 8 << 20
#: Largest frame that a client accepts, bytes: tokenizer files of large vocabularies are tens of megabytes.
MAX_SERVER_MESSAGE_BYTES = 256 << 20
#: Most numbers in one Abort.
MAX_ABORTED = 65_536


class FinishReason(IntEnum):
    """Finish code of an output row; 0 while the request continues."""

    NONE = 0
    STOP = 1  # EOS or one of stop_token_ids (stop strings are the client's)
    LENGTH = 2  # max_tokens or max_model_len
    ABORT = 3  # by the client, or the engine is shutting down


class ErrorCode(IntEnum):
    """Reason for a refusal or a failure."""

    INVALID_ARGUMENT = 1  # the message is wrong; sending it again does not help
    ALREADY_EXISTS = 2  # the request number is in use in this session
    RESOURCE_EXHAUSTED = 3  # a bound was reached; a later attempt may succeed
    UNAVAILABLE = 4  # the engine is draining or stopping
    VERSION_MISMATCH = 5  # the protocol majors differ
    DEADLINE_EXCEEDED = 6
    INTERNAL = 7
    PERMISSION_DENIED = 8  # only the engine's owner may ask for this
    QUARANTINED = 9  # the engine died several times while it ran this request; sending it again does not help
    NUMERIC = 10  # the request's logits were not finite
    PIN_REFUSED = 11  # a pin that the request requires, or a fork; docs/pins.md has the bounds


class PauseMode(IntEnum):
    """The requests that a Pause stops."""

    NEW = 0  # no request begins; those that have begun continue
    ALL = 1  # no request runs; requests keep their rows and blocks


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First message of a session; answered by Welcome or Refused."""

    major: int
    minor: int
    client_name: str
    session_token: bytes = b""  # of the client's lost session, which ends at once with its requests
    owner_token: bytes = b""  # the token of Start; it gives the owner's rights
    num_resumed: int = 0  # unfinished requests of the lost session; if sent first, no bound refuses them


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Submit one request. Answered by Outputs rows with its number, or by RequestFailed."""

    number: int  # uint32, chosen by the client, never reused within a session
    prompt_token_ids: bytes  # int32[num_prompt_tokens]
    params: SamplingParams
    seed: int  # uint64: key of the request's random stream; every request has one
    priority: int = 0  # smaller = sooner, if the scheduling policy uses priorities
    deadline_ms: int = 0  # milliseconds from receipt after which the request fails; 0 = none
    cache_salt: str = ""  # requests share prefix-cache blocks only if their salts are equal
    delivered: Delivered = []  # per choice, int32 tokens that the client already has; generation continues after them
    tenant: str = ""  # user that the client sends the request for; "" = the client itself
    adapter: AdapterId | None = None  # the adapter that it runs with
    features: FeatureUses = []  # features that replace tokens of its prompt, in order; put before the request
    pins: RequestPins = ()  # of its prompt; answered by Pinned


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Stop these requests; unknown and finished numbers are ignored. Each live one gets a last row with ABORT."""

    numbers: bytes  # uint32[n]
    choices: bytes = b""  # uint16[n]: the choice of each number to stop; empty = all choices


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """End the session; its requests are aborted, and the engine sends nothing more."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Renew the session's lease, as every message does; for a client that had nothing else to send."""


class GetTokenizer(Call, frozen=True, array_like=True, tag=16):
    """Ask for the model's tokenizer files. Answered by TokenizerFiles."""


class GetStatistics(Call, frozen=True, array_like=True, tag=17):
    """Ask for the engine's counters and gauges. Answered by Statistics, between two steps."""


class ResetPrefixCache(Call, frozen=True, array_like=True, tag=18):
    """Drop every cached block that no running request holds. Answered by CallDone, between two steps."""


class GetModelInformation(Call, frozen=True, array_like=True, tag=19):
    """Ask for the model, sizes and options of the engine. Answered by ModelInformation."""


class Pause(Call, frozen=True, array_like=True, tag=20):
    """Owner only. Pause the engine before the next step, for all clients. Answered by CallDone."""

    mode: PauseMode


class Resume(Call, frozen=True, array_like=True, tag=21):
    """Owner only. End a pause; do nothing if there is none. Answered by CallDone."""


class BeginDrain(Call, frozen=True, array_like=True, tag=22):
    """Owner only. Refuse new requests and end the engine after the last request. Answered by CallDone at once."""

    move_after_ms: int = -1  # after that, clients are told to continue unfinished requests elsewhere; -1 = never
    comes_back: bool = False  # the next engine answers at this address: the supervisor starts it


class Shutdown(Call, frozen=True, array_like=True, tag=23):
    """Owner only. End the engine at once. Answered by CallDone, then EngineStopping."""


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """Bounds of this engine, for clients that check requests before they send them."""

    max_model_len: int  # tokens of prompt and output together
    max_num_seqs: int  # requests that run at the same time
    max_message_bytes: int
    max_num_queued_requests: int = 0  # of all clients, that have not begun; 0 = not reported
    max_num_queued_tokens: int = 0  # of those requests
    max_client_bytes: int = 0  # of one session's unfinished requests, in the engine's memory
    heartbeat_ms: int = 0  # longest time between two messages of the client; 0 = no heartbeats are needed
    lease_ms: int = 0  # a session without a message for this long ends; 0 = never
    max_logprobs: int = -1  # per position of a request; -1 = any number, or not reported
    resume_ms: int = 0  # if this engine dies, another answers at its address within this time; 0 = none does


class ModelDescription(msgspec.Struct, frozen=True, array_like=True):
    """What a model's files say of it; empty or 0 = not known."""

    format: str = ""  # "gguf" | "safetensors"
    family: str = ""  # the architecture's name in the files
    num_parameters: int = 0
    quantization: str = ""  # how the weights are stored: "Q4_K_M", "BF16", "GPTQ"
    num_bytes: int = 0  # of the weights' files
    labels: list[str] = []  # of a classifier, by number


class Arithmetic(msgspec.Struct, frozen=True, array_like=True):
    """What the model's fingerprint is made of, part by part, for receipts."""

    weights: str  # hex digest of the model's files; "dummy-" before it if the weights are made up
    dtype: str
    variant: str  # of every kernel and summation order
    cpu_kernels: str  # the value of this option that selects the kernels


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=64):
    """Answer to Hello: the session is open."""

    major: int
    minor: int
    server_version: str
    engine_id: str  # random; new at each start of the process
    epoch: int  # counts the engine's restarts under one owner; outputs of another epoch are stale
    session_token: bytes  # 16 random bytes naming this session
    model_name: str
    model_fingerprint: str  # hex; equal fingerprints and numerics L2 mean equal tokens
    tokenizer_hash: str  # hex, of the tokenizer files' content; a key for caches of clients
    numerics: str  # "L0" | "L1" | "L2"
    vocab_size: int
    limits: Limits
    default_sampling: dict[str, float | int] = {}  # SamplingParams by name, for callers that give no parameters
    pid: int = 0  # of the engine process; 0 = not reported
    tasks: dict[str, int] = {}  # of requests, with the width of the vectors of each; empty: "generate" only
    is_encoder: bool = False  # tokens see the whole prompt
    features: FeatureLimits | None = None  # None: requests have none
    description: ModelDescription | None = None  # None: the model has no files
    arithmetic: Arithmetic | None = None  # None: not known, as of executors without weights
    #: The weights that it computes with now; None: those that it started with, which the other fields describe.
    weights: WeightsMark | None = None


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=65):
    """Answer to a Hello that is not accepted, or to a message that cannot be decoded."""

    code: ErrorCode
    message: str
    major: int = PROTOCOL_MAJOR
    minor: int = PROTOCOL_MINOR


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at L positions, as separate columns. Idempotent by (number, choice, position)."""

    numbers: bytes  # uint32[L]
    positions: bytes  # uint32[L]: index in the request's tokens, the prompt's first
    counts: bytes  # uint32[L]: entries of each; the first is the token at the position, the others the most likely ones
    ranks: bytes  # uint32[L]: of the token at the position, from 1
    token_ids: bytes  # int32[sum(counts)]
    values: bytes  # float32[sum(counts)]: natural logarithms
    choices: bytes = b""  # uint16[L]; empty = all 0


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag=66):
    """Outputs of one step for one client, as columns of R rows.

    (number, choice, position) makes delivery idempotent: at least once on the wire, exactly once to the caller.
    """

    epoch: int
    step: int
    numbers: bytes  # uint32[R]
    positions: bytes  # uint32[R]: index of the row's first token in the request's output
    counts: bytes  # uint16[R]: tokens of each row; 0 for a row that only finishes
    tokens: bytes  # int32[sum(counts)]
    choices: bytes = b""  # uint16[R]; empty = all 0
    finish: bytes = b""  # uint8[R] FinishReason; empty = none finished
    stop_tokens: list[tuple[int, int]] = []  # (row, token id) if a stop_token_id ended the request
    started: bytes = b""  # uint32[S, 2]: (number, prompt tokens found in the prefix cache) of requests that began
    logprobs: Logprobs | None = None  # never later than the tokens they belong to
    events: RequestEvents | None = None
    drafts: bytes = b""  # uint32[F, 4]: (number, choice, verified drafts, accepted ones) of rows that ended and had any
    pooled: Pooled | None = None
    weights_version: int = 0  # of the weights that computed the tokens; see WeightsMark


class RequestFailed(msgspec.Struct, frozen=True, array_like=True, tag=67):
    """Refusal or failure of a request: the last message for its number."""

    number: int
    code: ErrorCode
    message: str
    retry_after_ms: int = 0  # with RESOURCE_EXHAUSTED: when to send it again; 0 = never


class TokenizerFiles(msgspec.Struct, frozen=True, array_like=True, tag=80):
    """The model's tokenizer files, byte for byte as stored next to the weights; the core never parses them."""

    call: int
    tokenizer_hash: str
    files: dict[str, bytes]  # file name -> content; "gguf-header" = a GGUF file's metadata section


class Statistics(msgspec.Struct, array_like=True, tag=81):
    """Counters since the engine started, and gauges now. Not frozen: the scheduler increments one instance."""

    call: int
    num_steps: int
    num_running: int
    num_waiting: int
    num_finished: int
    num_preemptions: int
    num_prompt_tokens: int  # of requests that began
    num_generation_tokens: int
    num_scheduled_tokens: int
    num_scheduled_rows: int  # summed over the steps; / num_steps = mean batch size
    max_scheduled_rows: int
    prefix_cache_queries: int  # tokens
    prefix_cache_hits: int  # tokens
    num_blocks: int
    num_free_blocks: int
    max_used_blocks: int
    block_size: int
    num_recomputed_tokens: int = 0  # computed again after a preemption
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_skipped: int = 0  # times a running request wanted tokens and got none
    num_head_no_row: int = 0  # steps in which the first waiting request did not start, by reason
    num_head_no_budget: int = 0
    num_head_preempted: int = 0
    num_head_fenced: int = 0
    num_head_no_blocks: int = 0
    num_head_partial_prefills: int = 0
    num_swapped: int = 0  # now: preempted requests with a copy on the host
    num_on_hold: int = 0  # now: requests whose client does not read
    num_unbegun: int = 0  # now: requests that do not begin because of a pause
    num_swap_blocks: int = 0
    num_free_swap_blocks: int = 0
    engine_ns: int = 0  # clock of the engine at its answer; only differences are meaningful
    step_tokens: list[int] = []  # steps by number of tokens: the buckets of STEP_TOKEN_BOUNDS, then what is above
    num_drafts: int = 0  # times that a step verified drafts of a request's next tokens
    num_draft_tokens: int = 0  # draft tokens that steps verified
    num_accepted_tokens: int = 0  # of these: accepted
    num_accepted_tokens_per_pos: list[int] = []  # accepted ones by their position among the drafts of one step
    num_head_no_adapter: int = 0  # as num_head_no_row above
    num_host_blocks: int = 0  # room for blocks evicted from the KV cache
    num_kept_blocks: int = 0  # now: of these, in use
    num_host_hits: int = 0  # blocks that were copied back from there
    num_fetched_blocks: int = 0  # read from files into that memory
    num_stored_blocks: int = 0  # written from there to files
    weights_version: int = 0  # now: of the weights in use; see WeightsMark
    sleep_level: int = 0  # now: 0 = awake; 1 = without its KV cache, 2 = without its weights too
    num_head_no_encoder_budget: int = 0  # as num_head_no_row above
    num_encoder_inputs: int = 0  # images that were encoded
    num_encoder_hits: int = 0  # images that were not, because the encoder cache had them
    num_pins: int = 0  # now
    num_pinned_blocks: int = 0  # now: held by pins
    max_pinned_blocks: int = 0  # that pins may hold
    num_pins_refused: int = 0
    num_pins_yielded: int = 0  # pins whose blocks a request needed that could not run otherwise


class CallDone(msgspec.Struct, frozen=True, array_like=True, tag=82):
    """Success of a call that has no result."""

    call: int


class CallFailed(msgspec.Struct, frozen=True, array_like=True, tag=83):
    """Refusal or failure of a call."""

    call: int
    code: ErrorCode
    message: str


class ModelInformation(msgspec.Struct, frozen=True, array_like=True, tag=84):
    """Model, sizes and options of the engine."""

    call: int
    model_name: str
    model_fingerprint: str
    numerics: str
    executor: str
    dtype: str
    vocab_size: int
    eos_token_ids: list[int]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    not_taking: str = ""  # now: why new requests are refused, or do not begin; empty = they are accepted


class EngineStopping(msgspec.Struct, frozen=True, array_like=True, tag=96):
    """Last message of a session that the engine ends; `error` is empty for an orderly stop."""

    error: str = ""
    comes_back: bool = False  # unfinished requests may be sent to the next engine, as after a lost connection


_Answer: TypeAlias = TokenizerFiles | Statistics | ModelInformation | Explanation | Metrics | LoraAdapters | ReplicaList
CallResult: TypeAlias = _Answer | Weights | PinList | CallDone | CallFailed
ServerMessage: TypeAlias = Welcome | Refused | Outputs | RequestFailed | Pinned | KVEvents | CallResult | EngineStopping

#: All calls. A new one needs a Struct, a row here, and a handler in core/border/reception.py or core/engine.py.
CALLS: dict[type[Call], CallRule] = {
    GetTokenizer: CallRule(TokenizerFiles, is_at_border=True),
    GetStatistics: CallRule(Statistics),
    ResetPrefixCache: CallRule(CallDone),
    GetModelInformation: CallRule(ModelInformation, is_at_border=True),
    Pause: CallRule(CallDone, is_owners=True),
    Resume: CallRule(CallDone, is_owners=True),
    BeginDrain: CallRule(CallDone, is_owners=True, is_at_border=True),
    Shutdown: CallRule(CallDone, is_owners=True, is_at_border=True),
    GetMetrics: CallRule(Metrics, is_at_border=True),
    StopRequest: CallRule(CallDone, is_owners=True),
    Explain: CallRule(Explanation),
    FollowKVEvents: CallRule(CallDone),
    UnfollowKVEvents: CallRule(CallDone),
    LoadLora: CallRule(LoraAdapters, is_owners=True, is_at_border=True),
    UnloadLora: CallRule(CallDone, is_owners=True, is_at_border=True),
    ListLora: CallRule(LoraAdapters, is_at_border=True),
    GetReplicas: CallRule(ReplicaList),
    ChangeReplica: CallRule(CallDone, is_owners=True),
    UpdateWeights: CallRule(Weights, is_owners=True, is_at_border=True),
    GetWeights: CallRule(Weights),
    Sleep: CallRule(CallDone, is_owners=True),
    WakeUp: CallRule(CallDone, is_owners=True),
    ReleasePin: CallRule(CallDone),
    ForkPin: CallRule(CallDone),
    GetPins: CallRule(PinList),
}
if TYPE_CHECKING:
    ClientCall: TypeAlias = Call
else:
    ClientCall = Union[tuple(CALLS)]  # a decoder needs the union at run time  # noqa: UP007
Submission: TypeAlias = AddRequest | AddPooling  # a request: for tokens, or for vectors
ClientMessage: TypeAlias = Hello | Submission | PutFeature | Abort | Goodbye | Heartbeat | ClientCall

_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)

#: Errors of a typed decoder on hostile bytes (found by fuzzing msgspec 0.22). DecodeError includes ValidationError.
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as a frame."""
    return _encoder.encode(message)


def decode_client_message(frame: bytes | memoryview) -> ClientMessage:
    """Return a client's message. Errors: MalformedMessageError that states what is wrong with the frame."""
    try:
        return _client_decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a client message: {error}") from error


def decode_server_message(frame: bytes | memoryview) -> ServerMessage:
    """Return an engine's message. Errors: MalformedMessageError that states what is wrong with the frame."""
    try:
        return _server_decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a server message: {error}") from error
