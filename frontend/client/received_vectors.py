"""The vectors of pooling requests as a client receives them: read from the wire's columns."""

from collections.abc import Iterator

import numpy as np

from ipc.errors import MalformedMessageError
from ipc.tables.arrays import Floats
from ipc.wire.pooling_messages import Pooled


def vectors_of(pooled: Pooled) -> Iterator[tuple[int, Floats]]:
    """Yield (number, vectors [n, width] float32) of each request. Errors: MalformedMessageError."""
    try:
        columns = (np.frombuffer(column, "<u4") for column in (pooled.numbers, pooled.counts, pooled.widths))
        numbers, counts, widths = (column.astype(np.int64) for column in columns)
        values = np.frombuffer(pooled.values, "<f4").astype(np.float32, copy=False)
    except ValueError as error:
        raise MalformedMessageError(f"a column of vectors is not a whole number of entries: {error}") from error
    if not len(numbers) == len(counts) == len(widths) or int((counts * widths).sum()) != len(values):
        raise MalformedMessageError(
            f"columns of vectors do not fit: {len(numbers)} numbers, {len(counts)} counts, {len(widths)} widths, "
            f"{len(values)} values"
        )
    end = 0
    for number, count, width in zip(numbers.tolist(), counts.tolist(), widths.tolist(), strict=True):
        start, end = end, end + count * width
        yield number, values[start:end].reshape(count, width)
