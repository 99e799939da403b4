"""output_rows, output_vectors: what an Outputs message has of each request."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ipc.tables.arrays import Floats
from ipc.wire.messages import FinishReason, Outputs


class OutputRow(NamedTuple):
    """The part of one message that belongs to one choice of a request."""

    number: int
    choice: int
    tokens: list[int]  # new ones
    finish: FinishReason  # NONE: it continues


def output_rows(outputs: Outputs) -> Iterator[OutputRow]:
    """Yield the rows of a message that the engine core has made."""
    numbers = np.frombuffer(outputs.numbers, "<u4").tolist()
    choices = np.frombuffer(outputs.choices, "<u2").tolist() if outputs.choices else [0] * len(numbers)
    counts = np.frombuffer(outputs.counts, "<u2").tolist()
    finish = outputs.finish or bytes(len(numbers))
    tokens, at = np.frombuffer(outputs.tokens, "<i4").tolist(), 0
    for number, choice, count, code in zip(numbers, choices, counts, finish, strict=True):
        yield OutputRow(number, choice, tokens[at : at + count], FinishReason(code))
        at += count


def output_vectors(outputs: Outputs) -> Iterator[tuple[int, Floats]]:
    """Yield the number and the vectors [n, width] of each pooling request that ends in a message."""
    if (pooled := outputs.pooled) is None:
        return
    numbers, counts, widths = (np.frombuffer(one, "<u4") for one in (pooled.numbers, pooled.counts, pooled.widths))
    values, at = np.frombuffer(pooled.values, "<f4"), 0
    for number, count, width in zip(numbers.tolist(), counts.tolist(), widths.tolist(), strict=True):
        yield number, values[at : at + count * width].reshape(count, width)
        at += count * width
