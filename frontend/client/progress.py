"""Progress: the journal's state of one choice of a request."""

from collections.abc import Sequence
from typing import NamedTuple

from frontend.client.received_logprobs import ReceivedLogprobs
from frontend.client.request_events import RequestEvent
from ipc.errors import EngineCoreError
from ipc.tables.arrays import Floats, Int32s
from ipc.wire.messages import FinishReason
from ipc.wire.pin_messages import PinAnswer


class Progress(NamedTuple):
    """Snapshot of one choice, with its tokens from a given position. Times: monotonic seconds, 0 = none."""

    token_ids: Int32s
    finish: FinishReason
    stop_token: int | None
    num_cached_tokens: int
    arrival_time: float
    first_token_time: float
    last_token_time: float
    finished_time: float
    error: EngineCoreError | None  # the error with which the engine refused or failed the request
    logprobs: ReceivedLogprobs | None = None  # at least those of token_ids; None if none were requested
    events: tuple[RequestEvent, ...] = ()  # of all choices of the request
    num_draft_tokens: int = 0  # drafts of its next tokens that the engine has verified; known at its end
    num_accepted_tokens: int = 0  # of these: accepted
    vectors: Floats | None = None  # [n, width] float32 of a pooling request that has its answer
    #: (output position of the first token, version) of the weights that computed it and those after it, ascending;
    #: empty: all come from those of the engine's start.
    weights_versions: tuple[tuple[int, int], ...] = ()
    pins: Sequence[PinAnswer] = ()  # of the request
