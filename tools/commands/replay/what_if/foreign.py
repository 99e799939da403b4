"""read_requests: a capture's requests from its records alone, in case this version decides differently."""

import numpy as np

from core.capture.file import CaptureFile
from core.capture.records import NO_RESULT, Step
from ipc.wire.messages import AddRequest
from tools.commands.replay.differences import Batch, unpack
from tools.commands.replay.what_if.recording import Recorded, Requests


def read_requests(file: CaptureFile) -> list[Recorded]:
    """Return the requests; those with one choice have their tokens. Nothing is run again.

    If a pipelined engine preempted a request with a token in flight, that token is in the result twice. Errors:
    CaptureFileError.
    """
    reader, batch = Requests(), Batch()
    for turn in file.turns():
        reader.receive(turn)
        step = turn.step
        batch.apply(step)
        if step.result_step != NO_RESULT:
            _note(reader, batch, step)
            batch.forget(step.result_step)
    for one in file.last_inputs():
        reader.take_in(one.client, one.message, one.received_ns, one.received_ns)
    return reader.requests


def _note(reader: Requests, batch: Batch, step: Step) -> None:
    """Note the tokens of a step's result."""
    keys, tokens = batch.requests_of(step.result_step), unpack(step.tokens)
    counts = unpack(step.token_counts) or [1] * len(keys)
    firsts = (np.cumsum(counts) - counts).tolist()
    for key, first, count in zip(keys, firsts, counts, strict=False):
        run = [token for token in tokens[first : first + count] if token >= 0]
        one = None if key is None else reader.live(key)
        message = None if one is None else one.message
        if one is None or not isinstance(message, AddRequest) or not run or one.num_choices > 1:
            continue
        one.tokens[0] += run
        one.token_times += [step.now_ns + step.elapsed_ns] * len(run)
        if len(one.tokens[0]) == message.params.max_tokens:
            one.ended_ns = step.now_ns + step.elapsed_ns
