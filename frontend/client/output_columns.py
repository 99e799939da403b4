"""OutputColumns: an Outputs message as NumPy columns, checked for consistency."""

from typing import NamedTuple

import numpy as np

from ipc.errors import MalformedMessageError
from ipc.tables.arrays import Bools, Int32s, Ints, UInt8s
from ipc.wire.messages import FinishReason, Outputs

LAST_FINISH = int(max(FinishReason))


class OutputColumns(NamedTuple):
    """R rows and their T tokens. Columns that need no widening are views of the message."""

    numbers: Ints  # [R]
    positions: Ints  # [R]
    counts: Ints  # [R]
    tokens: Int32s  # [T]
    finish: UInt8s | None  # [R]; None = none finished
    choices: Ints | None = None  # [R]; None = all 0

    def where(self, keep: Bools) -> "OutputColumns":
        """Return the columns of the rows in the mask keep [R]."""
        return OutputColumns(
            self.numbers[keep],
            self.positions[keep],
            self.counts[keep],
            self.tokens[keep.repeat(self.counts)],
            None if self.finish is None else self.finish[keep],
            None if self.choices is None else self.choices[keep],
        )


def columns_of(outputs: Outputs) -> OutputColumns:
    """Return the message's columns. Errors: MalformedMessageError if the columns do not fit each other."""
    try:
        columns = OutputColumns(
            np.frombuffer(outputs.numbers, "<u4").astype(np.int64),
            np.frombuffer(outputs.positions, "<u4").astype(np.int64),
            np.frombuffer(outputs.counts, "<u2").astype(np.int64),
            np.frombuffer(outputs.tokens, "<i4"),
            np.frombuffer(outputs.finish, np.uint8) if outputs.finish else None,
            np.frombuffer(outputs.choices, "<u2").astype(np.int64) if outputs.choices else None,
        )
    except ValueError as error:
        raise MalformedMessageError(f"an output column is not a whole number of entries: {error}") from error
    num_rows = len(columns.numbers)
    num_finish = num_rows if columns.finish is None else len(columns.finish)
    lengths = (len(columns.positions), len(columns.counts), num_finish, int(np.add.reduce(columns.counts)))
    if (
        lengths != (num_rows, num_rows, num_rows, len(columns.tokens))
        or len(outputs.started) % 8
        or len(outputs.drafts) % 16
    ):
        raise MalformedMessageError(
            f"output columns do not fit: {num_rows} numbers, {lengths[0]} positions, {lengths[1]} counts with the sum "
            f"{lengths[3]}, {len(columns.tokens)} tokens, {lengths[2]} finish codes, {len(outputs.started)} B started, "
            f"{len(outputs.drafts)} B drafts"
        )
    if outputs.finish and max(outputs.finish) > LAST_FINISH:
        raise MalformedMessageError(f"finish code {max(outputs.finish)}; known are 0 to {FinishReason.ABORT.value}")
    if columns.choices is not None and len(columns.choices) != num_rows:
        raise MalformedMessageError(f"output columns do not fit: {num_rows} numbers, {len(columns.choices)} choices")
    return columns
