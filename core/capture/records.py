"""The records of a capture: what the engine was told, when, and what it decided, step by step.

A record is the msgpack payload of one frame of ipc/log_frames.py; the frame's tag names its kind. Fields are only ever
appended, with defaults. Columns are little-endian int32 arrays in `bin` fields.
"""

from typing import TypeAlias

import msgspec

from core.execution.executor import ModelInfo
from core.inputs import EngineInput
from ipc.config import EngineConfig
from ipc.errors import CaptureFileError
from ipc.messages import DECODE_ERRORS

MAGIC = "engine-core capture"
FORMAT_MAJOR = 1
FORMAT_MINOR = 1
#: In Step.result_step: no plan's result arrived in this step.
NO_RESULT = -1


class FormatHead(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of every Header, of all formats to come."""

    magic: str
    major: int
    minor: int


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The first record."""

    magic: str
    major: int
    minor: int
    engine_version: str
    config: msgspec.Raw  # LoggedConfig; resolved
    model: ModelInfo  # with the fingerprint and the numerics level
    epoch: int
    wall_ns: int  # since 1970, when the capture began
    monotonic_ns: int  # the clock of the steps at that moment


class Input(msgspec.Struct, frozen=True, array_like=True):
    """One message drained before the next Step."""

    client: int
    message: EngineInput


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One call of EngineCore.step: its clock value, its decision and the tokens that arrived in it."""

    now_ns: int  # handed to the step
    elapsed_ns: int  # what the step took; not compared by a replay
    digest: bytes  # blake2b-64 of the encoded plan; empty: the plan was empty
    rows: bytes  # int32[R] the batch; empty: as in the plan before
    counts: bytes  # int32[R] tokens scheduled for each; empty: as in the plan before
    removed_rows: bytes  # int32: rows given up since the plan before (finished, aborted or preempted)
    added: list[tuple[int, int, int, int]]  # (row, client, request number, tokens found in the prefix cache)
    num_preemptions: int  # since the engine started
    num_waiting: int  # requests, after the step
    num_free_blocks: int  # after the step
    result_step: int  # step of the plan whose tokens arrived; NO_RESULT: none did
    tokens: bytes  # int32: aligned with that plan's rows, as in ModelRunnerOutput
    error: str = ""  # the exception that ended the step, and the engine with it
    token_counts: bytes = b""  # int32[rows of that plan] of `tokens`, row after row; empty: one each


class Gap(msgspec.Struct, frozen=True, array_like=True):
    """Records that are missing here, because the file was too slow; their sequence numbers are skipped."""

    first: int
    count: int


class Close(msgspec.Struct, frozen=True, array_like=True):
    """The last record of a capture whose engine ended in order."""

    num_inputs: int
    num_steps: int
    num_lost: int


Record: TypeAlias = Header | Input | Step | Gap | Close

#: Tags of the frames. An unknown tag comes from a later minor of the format.
TAGS: dict[type[Record], int] = {Header: 1, Input: 2, Step: 3, Gap: 4, Close: 5}


class LoggedConfig(EngineConfig, frozen=True, kw_only=True, omit_defaults=False, forbid_unknown_fields=True):
    """Every option with its value, for defaults may change; an option unknown to the reader is an error."""


_encoder = msgspec.msgpack.Encoder()
_head_decoder = msgspec.msgpack.Decoder(FormatHead)
_config_decoder = msgspec.msgpack.Decoder(LoggedConfig)
_decoders: dict[int, msgspec.msgpack.Decoder[Record]] = {
    tag: msgspec.msgpack.Decoder(kind) for kind, tag in TAGS.items()
}


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def encode_config(config: EngineConfig) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(LoggedConfig(**msgspec.structs.asdict(config))))


def decode_record(tag: int, payload: bytes) -> Record | None:
    """None for a tag this version does not know. Errors: CaptureFileError saying what is wrong with the payload."""
    if tag not in _decoders:
        return None
    try:
        return _decoders[tag].decode(payload)
    except DECODE_ERRORS as error:
        raise CaptureFileError(f"the record's checksum is right and its content is not: {error}") from error


def decode_format(payload: bytes) -> FormatHead:
    """What kind of file a first record says it begins. Errors: CaptureFileError."""
    try:
        return _head_decoder.decode(payload)
    except DECODE_ERRORS as error:
        raise CaptureFileError(f"not a capture of engine-core: {error}") from error


def decode_config(header: Header) -> EngineConfig:
    """The resolved config, without its `capture`. Errors: DECODE_ERRORS for options that this version does not have."""
    options = msgspec.structs.asdict(_config_decoder.decode(header.config))
    return EngineConfig(**{**options, "capture": None})
