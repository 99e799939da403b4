"""The messages from the first rank of a group to the others in each step: what they cannot know from the plan.

All ranks run the same plan at the same time. The first one samples. If it computes something in addition to the step's
forward pass, it tells the others to do the same.
"""

from typing import TypeAlias

import msgspec
import numpy as np

from ipc.machine.channel import Channel
from ipc.tables.arrays import Int32s, Ints


class Sampled(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """The step ends. tokens, counts: int32 columns of ModelRunnerOutput; empty counts = one token each."""

    tokens: bytes
    counts: bytes = b""


class LogitsOf(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Compute the logits of more rows of the step. rows: int64."""

    rows: bytes


class HiddenOf(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Compute the hidden states of rows of the step. rows: int64."""

    rows: bytes


class StatesOf(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Compute what the model keeps of its hidden states for rows of the step. rows: int64."""

    rows: bytes


class Guess(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """Run the assistant's layers: one token of each of n rows. given: n inputs, float32. lengths: n, int64.

    tables: int32 block tables of the rows; empty: the last ones.
    """

    given: bytes
    lengths: bytes
    tables: bytes = b""


class Trial(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Run a step of num_tokens made-up tokens, with logits for the last num_samples."""

    num_tokens: int
    num_samples: int


class Measured(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """There are no more Trials."""


Order: TypeAlias = Sampled | LogitsOf | HiddenOf | StatesOf | Guess | Trial | Measured

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


class Followers:
    """The first rank's ends of its channels to all others."""

    def __init__(self, channels: list[Channel]) -> None:
        self._channels = channels

    def tell(self, order: Order) -> None:
        """Send an order to all. Errors: ChannelEndedError."""
        message = _encoder.encode(order)
        for channel in self._channels:
            channel.send(message)


def next_order(channel: Channel) -> Order:
    """Wait for the first rank's next order and return it. Errors: ChannelEndedError."""
    return _decoder.decode(channel.receive())


def as_rows(column: bytes) -> Ints:
    """Return an int64 column."""
    return np.frombuffer(column, np.int64)


def as_tokens(column: bytes) -> Int32s:
    """Return an int32 column."""
    return np.frombuffer(column, np.int32)
