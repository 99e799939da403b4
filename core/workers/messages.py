"""The messages between an engine and its worker processes, each of which runs the plans on its own executor.

An engine asks, and a worker answers in the same order. Only Run may be sent before the previous one is answered. Each
worker gets every message and answers it, except that only one worker answers Run: the first rank of the last stage.
AddMatrix, DropAdapters, AddFeature and DropFeatures have no answer; what they do is done before the next Run.
"""

from typing import TypeAlias

import msgspec

from core.execution.executor import Costs, ModelInfo, StepCosts
from core.workers.wires import Place, Wires
from ipc.errors import MalformedMessageError
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.wire.messages import DECODE_ERRORS
from kernels.memory.shared_file import SharedArray


class Load(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Load the model. Answer: Loaded, after any number of Progress."""

    config: EngineConfig
    place: Place = Place()  # this worker's place
    wires: Wires = msgspec.field(default_factory=Wires)  # its descriptors


class CountBlocks(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Ask how many KV blocks of block_size tokens fit in memory_bytes. Answer: Number."""

    memory_bytes: int
    block_size: int


class FindMemory(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Ask for the bytes that are free for the KV cache on the executor's own device. Answer: Number."""


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Allocate the KV cache. Answer: Loaded, because the model's facts may change with the length."""

    config: ResolvedConfig


class MeasureCosts(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Measure the cost of restoring a preempted request. Answer: Measured."""


class MeasureSteps(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Measure steps of some sizes. Answer: MeasuredSteps."""


class WarmUp(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Run a first step. Answer: Number, in ns."""


class Run(msgspec.Struct, frozen=True, array_like=True, tag=8, gc=False):
    """Run a step. plan: encoded (core/execution/plan.py). Answer of one worker: Result.

    sampled: (token_ids, counts) of the steps whose results were taken since the last Run, for all stages but the last.
    """

    plan: bytes
    sampled: list[tuple[bytes, bytes | None]] = []


class ShareBlocks(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Ask where the blocks are in the worker's file, which Load named, or for answers about them on its channel.

    After Allocate. Answer: SharedPlaces.
    """


class SentNumbers(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A matrix of num_rows rows; dtype: a name of ELEMENT_TYPES."""

    dtype: str
    num_rows: int
    content: bytes


class AddMatrix(msgspec.Struct, frozen=True, array_like=True, tag=21, gc=False):
    """One of the matrices of an adapter, which may be used after the last one."""

    digest: str
    name: str
    a: SentNumbers
    b: SentNumbers
    scale: float
    is_last: bool


class DropAdapters(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """Forget adapters."""

    digests: list[str]


class AddFeature(msgspec.Struct, frozen=True, array_like=True, tag=23, gc=False):
    """The next rows of a feature that rows of later plans have. rows: float32 [rows, width]."""

    digest: bytes
    width: int
    rows: bytes


class DropFeatures(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """Forget features."""

    digests: list[bytes]


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The facts about the model. reads_features: whether this worker takes features."""

    info: ModelInfo
    reads_features: bool = False


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The fraction of the weights that this worker has loaded so far."""

    share: float


class Number(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """A number; None: the executor has none."""

    value: int | None


class Measured(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """The costs of restoring a preempted request."""

    costs: Costs


class MeasuredSteps(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The durations of steps."""

    costs: StepCosts


class Result(msgspec.Struct, frozen=True, array_like=True, tag=16, gc=False):
    """The output of the oldest unanswered step (core/execution/encoding.py)."""

    output: bytes


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """The worker could not do what was requested, and ends. error: a class of ipc.errors, or "" for a bug."""

    error: str
    text: str


class SharedPlaces(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Where the worker's parts of SharedBlocks are in its file: a SharedArray for each array.

    served: instead, of a worker without a file: of each memory, by name, the number of blocks and the bytes of one.
    """

    cache: list[SharedArray]
    host: list[SharedArray]
    states: list[SharedArray]
    layout: str
    served: dict[str, tuple[int, int]] = {}


Question: TypeAlias = (
    Load
    | CountBlocks
    | FindMemory
    | Allocate
    | MeasureCosts
    | MeasureSteps
    | WarmUp
    | Run
    | ShareBlocks
    | AddMatrix
    | DropAdapters
    | AddFeature
    | DropFeatures
)
Answer: TypeAlias = Loaded | Progress | Number | Measured | MeasuredSteps | Result | Failed | SharedPlaces

_encoder = msgspec.msgpack.Encoder()
_question_decoder: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode_message(message: Question | Answer) -> bytes:
    """Return the message as msgpack."""
    return _encoder.encode(message)


def decode_question(frame: bytes) -> Question:
    """Return the engine's message. Errors: MalformedMessageError, or ConfigError for a config with a bad value."""
    try:
        return _question_decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a message of an engine to its worker: {error}") from error


def decode_answer(frame: bytes) -> Answer:
    """Return the worker's message. Errors: MalformedMessageError."""
    try:
        return _answer_decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a message of a worker: {error}") from error
