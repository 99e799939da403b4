"""A trace as requests to the engine: lengths and times scaled, prompts made up, priorities and clients assigned.

Lengths: if the longest request (input + output) has more than max_tokens tokens, every length is multiplied by k / 512
and rounded down, to at least 1; k is the largest whole number with which the longest fits. A hash id's block of 512
tokens becomes k tokens, equal if the id is equal, so that prompts share the same parts as before; blocks of 16 tokens
(Qwen-Bailian, captures) shrink in the same way. Rows without hash ids share nothing.
Times: arrivals are multiplied by time_scale.
Every fifth request (the first, the sixth, ...) is urgent: priority 0, the others 1.
Client 0 sends every other request (the first, the third, ...); the remaining clients take turns with the rest.
"""

from typing import NamedTuple

import numpy as np

from core.executors.fake import mix
from ipc.errors import ConfigError
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import Int32s
from ipc.tables.rounding import ceil_div
from ipc.wire.messages import AddRequest
from tools.lab.traces.row import HASH_BLOCK, Row, Trace

_FIRST_ID = 3  # smaller ids are the special tokens of the fake executor


class TimedRequest(NamedTuple):
    """A request, its client, and its arrival in virtual ns."""

    arrival_ns: int
    client: int
    message: AddRequest  # its number is its position in the trace, from 0


class Workload(NamedTuple):
    """A trace's requests, in order of arrival. length_scale: k / 512."""

    trace: Trace
    requests: list[TimedRequest]
    length_scale: float


def make_workload(trace: Trace, *, max_tokens: int, time_scale: float, num_clients: int, vocab_size: int) -> Workload:
    """Return the requests of a trace, scaled as above. Errors: ConfigError if max_tokens is too small for the trace."""
    longest = max(row.num_input + row.num_output for row in trace.rows)
    scale = min(HASH_BLOCK, HASH_BLOCK * max_tokens // longest)
    if scale < 1 or max_tokens < 2:
        raise ConfigError(
            f"--max-tokens {max_tokens} is too small for {trace.name}: its longest request has {longest} tokens, "
            f"which are scaled by no less than 1/{HASH_BLOCK}; use at least {ceil_div(longest, HASH_BLOCK)}"
        )
    requests = []
    for number, row in enumerate(trace.rows):
        params = SamplingParams(max_tokens=max(1, row.num_output * scale // HASH_BLOCK), ignore_eos=True, temperature=0)
        prompt = _prompt(row, number, scale, vocab_size, trace.hash_block)
        message = AddRequest(number, prompt.astype("<i4").tobytes(), params, 0, priority=int(number % 5 > 0))
        client = 0 if number % 2 == 0 or num_clients == 1 else 1 + number // 2 % (num_clients - 1)
        requests.append(TimedRequest(round(row.arrival_s * time_scale * 1e9), client, message))
    return Workload(trace, requests, scale / HASH_BLOCK)


def _prompt(row: Row, number: int, scale: int, vocab_size: int, hash_block: int) -> Int32s:
    """Return the prompt of a row. Token o of block h is a function of h and o alone.

    hash_block: number of tokens that one of the row's hash ids represents. Tokens after the last one are the row's own.
    """
    positions = np.arange(max(1, row.num_input * scale // HASH_BLOCK), dtype=np.uint64)
    if row.hash_ids is None:  # one block, with an id that is no hash id
        blocks, offsets = np.full(len(positions), 2**53 + number, np.uint64), positions
    elif hash_block == HASH_BLOCK and len(row.hash_ids) * HASH_BLOCK >= row.num_input:
        blocks = np.array(row.hash_ids, np.uint64)[positions // np.uint64(scale)]
        offsets = positions % np.uint64(scale)
    else:  # smaller blocks may not become a whole number of tokens: each is placed by its original position
        places = positions * np.uint64(HASH_BLOCK) // np.uint64(scale)
        ids = np.array([*row.hash_ids, 2**53 + number], np.uint64)
        blocks = ids[np.minimum(places // np.uint64(hash_block), np.uint64(len(row.hash_ids)))]
        offsets = places % np.uint64(hash_block)
    tokens = mix(mix(blocks) + offsets) % np.uint64(vocab_size - _FIRST_ID)
    return (tokens + np.uint64(_FIRST_ID)).astype(np.int32)
