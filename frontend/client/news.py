"""News: a batch of news from the journal, for a listener that serves many requests."""

from typing import NamedTuple

from ipc.tables.arrays import NO_INT32S, NO_INTS, NO_UINT8S, Int32s, Ints, UInt8s


class News(NamedTuple):
    """New tokens and ends of R choices, as columns."""

    numbers: Ints  # [R]
    choices: Ints  # [R]
    counts: Ints  # [R]: new tokens of each
    tokens: Int32s  # [sum(counts)], row after row
    finish: UInt8s  # [R] FinishReason; NONE for a choice that continues
    has_more: bool = False  # there is more to take


NO_NEWS = News(NO_INTS, NO_INTS, NO_INTS, NO_INT32S, NO_UINT8S)
