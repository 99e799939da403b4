"""output_rows: the rows of an Outputs message, one by one."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

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
