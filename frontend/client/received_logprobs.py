"""Received log probabilities, read from the wire's columns; each position is kept once."""

from typing import NamedTuple

import numpy as np

from ipc.errors import MalformedMessageError
from ipc.tables.arrays import Floats, Int32s, UInt16s, UInt32s
from ipc.wire.messages import Logprobs


class PositionLogprobs(NamedTuple):
    """The log probabilities at one position: its own token first, then the most likely ones."""

    rank: int  # of the first token
    token_ids: Int32s  # [n]
    values: Floats  # [n]


class ReceivedLogprobs:
    """The log probabilities of one choice. Each position is kept once, however often it is delivered.

    `prompt` starts with the second token of the prompt, because the first has no prediction.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        self.prompt: list[PositionLogprobs] = []
        self.output: list[PositionLogprobs] = []
        self._num_prompt_tokens = num_prompt_tokens
        self._next: int | None = None  # expected position; None: any
        self._version = 0  # of the weights that the prompt's are of

    def add(self, position: int, logprobs: PositionLogprobs, weights_version: int = 0) -> None:
        """Add a position; ignore a known one. AssertionError if an earlier one is missing.

        The prompt's are all of one version of the weights: a later one replaces them until the first token.
        """
        if weights_version != self._version:
            self._version = weights_version
            if not self.output and self.prompt and position < self._num_prompt_tokens:
                self.prompt.clear()
                self._next = None
        if self._next is not None and position < self._next:
            return
        assert self._next in (None, position), f"log probabilities of {position} follow, but {self._next} is expected"
        (self.prompt if position < self._num_prompt_tokens else self.output).append(logprobs)
        self._next = position + 1


class LogprobColumns(NamedTuple):
    """The wire's columns of L positions. counts: entries of each position, which are consecutive in token_ids and
    values.
    """

    numbers: UInt32s
    positions: UInt32s
    counts: UInt32s
    ranks: UInt32s
    token_ids: Int32s
    values: Floats
    choices: UInt16s

    def split(self) -> list[tuple[int, int, int, PositionLogprobs]]:
        """Return (number, choice, position, log probabilities) of each position."""
        ends = np.cumsum(self.counts, dtype=np.int64)
        return [
            (number, choice, position, PositionLogprobs(rank, self.token_ids[start:end], self.values[start:end]))
            for number, choice, position, rank, start, end in zip(
                self.numbers.tolist(),
                self.choices.tolist(),
                self.positions.tolist(),
                self.ranks.tolist(),
                (ends - self.counts).tolist(),
                ends.tolist(),
                strict=True,
            )
        ]


def logprob_columns_of(message: Logprobs) -> LogprobColumns:
    """Return the message's columns. Errors: MalformedMessageError if the columns do not fit each other."""
    try:
        numbers = np.frombuffer(message.numbers, "<u4")
        columns = LogprobColumns(
            numbers,
            np.frombuffer(message.positions, "<u4"),
            np.frombuffer(message.counts, "<u4"),
            np.frombuffer(message.ranks, "<u4"),
            np.frombuffer(message.token_ids, "<i4"),
            np.frombuffer(message.values, "<f4"),
            np.frombuffer(message.choices, "<u2") if message.choices else np.zeros(len(numbers), np.uint16),
        )
    except ValueError as error:
        raise MalformedMessageError(f"a column of logprobs is not a whole number of entries: {error}") from error
    lengths = [len(column) for column in columns]
    entries = int(columns.counts.sum(dtype=np.int64))
    if lengths != [lengths[0]] * 4 + [entries] * 2 + [lengths[0]] or not columns.counts.all():
        raise MalformedMessageError(f"columns of logprobs do not fit: {lengths} with {entries} entries")
    return columns
