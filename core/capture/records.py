"""The records of a capture: the engine's inputs with their times, and its decisions, step by step.

A record is the msgpack payload of one frame of ipc/records/log_frames.py. The frame's tag gives its type. New fields
are always appended, with defaults. Columns are little-endian int32 arrays in `bin` fields.
"""

from typing import TypeAlias

import msgspec

from core.execution.executor import ModelInfo
from core.inputs import EngineInput
from ipc.errors import CaptureFileError, EngineCoreError
from ipc.options.resolved import ResolvedConfig
from ipc.options.schedulers import BUILT_IN_SCHEDULER
from ipc.wire.messages import DECODE_ERRORS

MAGIC = "engine-core capture"
FORMAT_MAJOR = 1
#: A release that appends to the records below, or to anything in them, increments it.
FORMAT_MINOR = 0
#: In Step.result_step: no result arrived in this step.
NO_RESULT = -1


class OtherModelError(EngineCoreError):
    """The capture is valid, but the replay's model, options or engine differ from the captured ones."""


class FormatHead(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of every Header, in this and all later formats."""

    magic: str
    major: int
    minor: int


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The first record: the format, and the engine that was captured."""

    magic: str
    major: int
    minor: int
    engine_version: str
    config: msgspec.Raw  # an encoded LoggedConfig
    model: ModelInfo  # with the fingerprint and the numerics level
    epoch: int
    wall_ns: int  # wall clock when the capture started, since 1970
    monotonic_ns: int  # the steps' clock at that moment
    is_redacted: bool = False  # its token ids were renamed; see core/capture/redaction.py


class Input(msgspec.Struct, frozen=True, array_like=True):
    """One message drained before the next Step."""

    client: int
    message: EngineInput
    received_ns: int = 0  # when the border had it ready for the engine, on the steps' clock; 0: unknown


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One call of EngineCore.step: its clock value, its decision and the tokens that arrived in it."""

    now_ns: int  # the step's clock value
    elapsed_ns: int  # duration of the step; a replay does not compare it
    digest: bytes  # blake2b-64 of the encoded plan; empty: the plan was empty
    rows: bytes  # int32[R] the batch; empty: as in the previous plan
    counts: bytes  # int32[R] tokens scheduled for each; empty: as in the previous plan
    removed_rows: bytes  # int32: rows given up since the previous plan (finished, aborted or preempted)
    added: list[tuple[int, int, int, int]]  # (row, client, request number, tokens found in the prefix cache)
    num_preemptions: int  # since the engine started
    num_waiting: int  # requests, after the step
    num_free_blocks: int  # after the step
    result_step: int  # step of the plan whose tokens arrived, or NO_RESULT
    tokens: bytes  # int32: aligned with that plan's rows, as in ModelRunnerOutput
    error: str = ""  # the exception that ended the step and the engine
    # int32[rows of that plan]: how many `tokens` each row has, row after row; empty: one each
    token_counts: bytes = b""
    #: int32[rows of that plan]: drafts that the executor proposed with the tokens; empty: none. Drafts of the
    #: scheduler's own proposers are computed again.
    draft_counts: bytes = b""
    draft_tokens: bytes = b""  # int32, row after row
    #: int32[3], us in this call: until the plan was made, then until a result was available, then until the end. Empty:
    #: the call ran nothing. A replay does not compare it.
    times: bytes = b""
    #: For pooling rows: int32[P] index in that plan's rows, counts and widths, then the float32 values.
    pooled: tuple[bytes, bytes, bytes, bytes] | None = None
    candidate_rows: bytes = b""  # int32[C]: index in that plan's rows of each beam search row with candidates
    candidate_counts: bytes = b""  # int32[C] of each
    candidate_tokens: bytes = b""  # int32, row after row
    candidate_values: bytes = b""  # float32: their log probabilities


class Gap(msgspec.Struct, frozen=True, array_like=True):
    """Lost records: the file was too slow for them. Their sequence numbers are skipped.

    first: sequence number of the first lost record.
    """

    first: int
    count: int


class Close(msgspec.Struct, frozen=True, array_like=True):
    """The last record, written when the engine ends normally: the totals of the capture."""

    num_inputs: int
    num_steps: int
    num_lost: int


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """The engine's whole state between two steps, from which a replay can start.

    num_steps: calls of EngineCore.step before it, since the engine started; num_inputs: messages in these steps.
    """

    num_steps: int
    num_inputs: int
    state: bytes  # a snapshot of EngineCore.state(); see core/capture/snapshot.py


Record: TypeAlias = Header | Input | Step | Gap | Close | Checkpoint

#: Tags of the frames. An unknown tag comes from a later minor version of the format.
TAGS: dict[type[Record], int] = {Header: 1, Input: 2, Step: 3, Gap: 4, Close: 5, Checkpoint: 6}


class LoggedConfig(ResolvedConfig, frozen=True, kw_only=True, omit_defaults=False, forbid_unknown_fields=True):
    """The config with every option's value, because defaults may change. An unknown option is an error."""


class _SchedulerName(msgspec.Struct, frozen=True):
    """The only option of a LoggedConfig that chooses code in every replay."""

    scheduler_cls: str = BUILT_IN_SCHEDULER  # captures of engines without the option


_encoder = msgspec.msgpack.Encoder()
_head_decoder = msgspec.msgpack.Decoder(FormatHead)
_config_decoder = msgspec.msgpack.Decoder(LoggedConfig)
_decoders: dict[int, msgspec.msgpack.Decoder[Record]] = {
    tag: msgspec.msgpack.Decoder(kind) for kind, tag in TAGS.items()
}


def encode_record(record: Record) -> bytes:
    """Return the record as msgpack, without its tag."""
    return _encoder.encode(record)


def encode_config(config: ResolvedConfig) -> msgspec.Raw:
    """Return the config as an encoded LoggedConfig."""
    return msgspec.Raw(_encoder.encode(LoggedConfig(**msgspec.structs.asdict(config))))


def decode_record(tag: int, payload: bytes) -> Record | None:
    """Return the record; None for an unknown tag. Errors: CaptureFileError that describes the bad payload."""
    if tag not in _decoders:
        return None
    try:
        return _decoders[tag].decode(payload)
    except DECODE_ERRORS as error:
        raise CaptureFileError(f"the record's checksum is right, but its content is invalid: {error}") from error


def decode_format(payload: bytes) -> FormatHead:
    """Return the file's format from its first record. Errors: CaptureFileError."""
    try:
        return _head_decoder.decode(payload)
    except DECODE_ERRORS as error:
        raise CaptureFileError(f"not a capture of engine-core: {error}") from error


def decode_config(header: Header) -> ResolvedConfig:
    """Return the config with capture=None. Errors: DECODE_ERRORS for unknown options."""
    options = msgspec.structs.asdict(_config_decoder.decode(header.config))
    return ResolvedConfig(**{**options, "capture": None})


def scheduler_of(header: Header) -> str:
    """Return the name of the captured engine's scheduler. Errors: CaptureFileError."""
    try:
        return msgspec.msgpack.decode(header.config, type=_SchedulerName).scheduler_cls
    except DECODE_ERRORS as error:
        raise CaptureFileError(f"the options of the captured engine are invalid: {error}") from error
