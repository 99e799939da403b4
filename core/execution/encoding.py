"""Encodes plans and outputs as bytes, for executors in other processes.

Columns are little-endian int32 or float32 in `bin` fields. encode_plan() is in core/execution/plan.py, because captures
use it too.
"""

from functools import cache
from typing import Any

import msgspec
import numpy as np

from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from ipc.errors import MalformedMessageError
from ipc.tables.arrays import dtype_of
from ipc.wire.messages import DECODE_ERRORS

_DTYPES = {np.dtype(np.int32): np.dtype("<i4"), np.dtype(np.float32): np.dtype("<f4")}


def encode_output(output: ModelRunnerOutput) -> bytes:
    """Return the output of a step as msgpack."""
    return _encoder.encode(output)


def decode_output(data: bytes) -> ModelRunnerOutput:
    """Return the output encoded by encode_output(). Its columns are read-only. Errors: MalformedMessageError."""
    try:
        return _output_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not the output of a step: {error}") from error


def decode_plan(data: bytes) -> SchedulerOutput:
    """Return the plan encoded by encode_plan(). Its columns are read-only. Errors: MalformedMessageError."""
    try:
        return _plan_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a plan: {error}") from error


def _encode_column(value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype in _DTYPES and value.ndim == 1:
        return value.astype(_DTYPES[value.dtype], copy=False).tobytes()
    kind = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
    raise TypeError(f"columns of an output must be int32 or float32, not {kind}")


def _decode_column(kind: Any, value: Any) -> Any:
    """Return a column from its bytes. kind: Int32s or Floats, or what they are aliases of."""
    return np.frombuffer(value, _dtype_on_the_wire(kind))


@cache
def _dtype_on_the_wire(kind: Any) -> np.dtype[Any]:
    return _DTYPES[dtype_of(kind)]


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_column)
_output_decoder = msgspec.msgpack.Decoder(ModelRunnerOutput, dec_hook=_decode_column)
_plan_decoder = msgspec.msgpack.Decoder(SchedulerOutput, dec_hook=_decode_column)
