"""The rows of a trace, the formats of its lines, and how arrival times are made if it has none."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

HASH_BLOCK = 512  # prompt tokens that one of Mooncake's hash ids stands for


class Row(NamedTuple):
    """One request."""

    arrival_s: float  # since any time before the first request
    num_input: int
    num_output: int
    hash_ids: tuple[int, ...] | None = None  # one for hash_block tokens of the prompt; the last may be partial
    ttft_s: float | None = None  # to the first token, as measured when the trace was recorded
    end_s: float | None = None  # to the last token, as measured then
    is_cancelled: bool = False  # its client left after num_output tokens


class Trace(NamedTuple):
    """A trace: rows in order of arrival, the first at 0 s.

    num_skipped: requests that failed when it was recorded. num_estimated: rows whose lengths are estimates.
    """

    name: str
    rows: list[Row]
    hash_block: int = HASH_BLOCK
    num_skipped: int = 0
    num_estimated: int = 0


#: Parses a line; None: a request that failed when the trace was recorded.
Parse: TypeAlias = Callable[[str], Row | None]


class Format(NamedTuple):
    """How lines become rows. header: how many lines come before the first row."""

    parse: Parse
    header: int = 0
    hash_block: int = HASH_BLOCK


class Making(NamedTuple):
    """How arrival times are made if a file has none: at a rate [1/s], with gamma-distributed gaps."""

    rate: float | None = None
    burstiness: float = 1.0  # 1 = Poisson; smaller = in bursts
    seed: int = 0
    tokenizer: str | None = None  # folder of the tokenizer that measures texts
