"""Messages on scheduling: request events, explanations, the stream of KV events, and the calls that ask for them.

They are part of the unions of ipc/wire/messages.py. Times are ns on the engine's own clock, whose zero is arbitrary.
"""

from enum import IntEnum

import msgspec

from ipc.wire.call import Call
from ipc.wire.kv_events import KVEvent

#: In Explain.number: every request, with the state of the engine.
EVERY_REQUEST = -1
#: In Explain.session: the caller's own.
OWN_SESSION = 0


class EventKind(IntEnum):
    """The kinds of events of one choice of a request."""

    QUEUED = 1
    SCHEDULED = 2  # for the first time
    PREEMPTED = 3
    RESUMED = 4


class EventCause(IntEnum):
    """The causes of PREEMPTED."""

    NONE = 0
    OLDER = 1  # a running request, served before it, needed blocks
    MORE_URGENT = 2  # a waiting request took its place
    HOLD = 3  # its client does not read


class RequestEvents(msgspec.Struct, frozen=True, array_like=True):
    """The E events of one client's requests, in the order in which they happened."""

    numbers: bytes  # uint32[E]
    choices: bytes  # uint16[E]
    kinds: bytes  # uint8[E] EventKind
    causes: bytes  # uint8[E] EventCause
    amounts: bytes  # uint32[E]: PREEMPTED: blocks copied to the host, 0 = computed again later; others: tokens found
    times: bytes  # int64[E] ns


class SchedulingState(IntEnum):
    """The states of a live request."""

    RUNNING = 1
    WAITING = 2
    SWAPPED = 3  # it waits, and the host has a copy of its computed blocks
    ON_HOLD = 4  # it waits, because its client does not read


class Reason(IntEnum):
    """The reason why a request got no tokens in the last step; `needed` and `available` count what it lacks."""

    NONE = 0  # it got some
    NO_ROW = 1  # max_num_seqs requests run
    NO_BUDGET = 2  # tokens: other requests got all of the step's
    PREEMPTED = 3  # in the last step
    FENCED = 4  # blocks: enough were freed for it, but they are in use until the steps in flight end
    BEHIND = 5  # it was not examined: the holder must start first and lacks something
    NOT_YET = 6  # no step has examined it: it has just arrived, or prompts are delayed (scheduler_delay_factor)
    PAUSED = 7  # the engine's owner has paused it
    ON_HOLD = 8  # its client does not read
    FIRST_CHOICE = 9  # another choice of its request computes their prompt, with which it starts
    NO_REPLICA = 10  # it waits in a fleet's queue: no replica takes it
    FETCHING = 11  # KV blocks of its prompt are being read from files, or from another engine
    NO_BLOCKS = 16  # blocks: too few are left, see the other numbers
    PARTIAL_PREFILLS = 17  # max_num_partial_prefills prompts are being computed in chunks
    NO_ADAPTER = 18  # requests with max_loras other adapters run
    NO_ENCODER_BUDGET = 19  # tokens of its next image, which the step, or the encoder cache, had no room for
    IN_FLIGHT = 32  # it runs, but its last token is in a step in flight
    SKIPPED_BUDGET = 33  # it runs, but requests served before it took the step's tokens
    SKIPPED_BLOCKS = 34  # it runs and keeps its blocks, but requests served before it took the free ones
    PROMPTS_FIRST = 35  # it runs, but the step had only prompts (enable_chunked_prefill=false)
    NEXT_TURN = 36  # it runs, but its turn comes in a later step (pipeline_parallel_size)
    SKIPPED_ENCODER_BUDGET = 37  # as NO_ENCODER_BUDGET, but it runs


class RequestExplanation(msgspec.Struct, frozen=True, array_like=True):
    """The scheduling of one choice of one request."""

    session: int
    number: int
    choice: int
    state: SchedulingState
    reason: Reason
    needed: int  # of what it lacks
    available: int
    last_tokens: int  # that it got in the last step
    position: int  # in the queue, from 0; of a running one in the order in which rows are served; -1 = in neither
    holder_session: int  # of the request that it waits behind; 0 = none
    holder_number: int
    priority: int
    num_prompt_tokens: int
    num_tokens: int  # prompt and output so far
    max_total_tokens: int
    num_computed_tokens: int  # of a waiting one: in the prefix cache or on the host
    num_blocks: int  # of a running one: held; of a waiting one: found in the prefix cache
    num_missing_blocks: int  # needed in addition, to start or for the tokens that it has
    num_reserve_blocks: int  # that must also stay free: watermark and hysteresis
    num_preemptions: int  # caused by running requests
    num_overtaken: int  # times that another request started while it was first and did not fit
    waited_ns: int  # since it arrived


class Explain(Call, frozen=True, array_like=True, tag=24):
    """Ask why a request does not run. Answered by Explanation, between two steps."""

    number: int = EVERY_REQUEST
    session: int = OWN_SESSION
    limit: int = 100  # most requests in the answer


class StopRequest(Call, frozen=True, array_like=True, tag=33):
    """Owner only. Abort a request of any session; its client gets last rows with ABORT. Answered by CallDone.

    A request that is not live is ignored.
    """

    session: int
    number: int


class FollowKVEvents(Call, frozen=True, array_like=True, tag=25):
    """Send this session the content of the prefix cache, and every change from then on.

    Answered by CallDone; KVEvents follow. A second FollowKVEvents begins again.
    """


class UnfollowKVEvents(Call, frozen=True, array_like=True, tag=26):
    """Stop the stream of KVEvents. Answered by CallDone; no KVEvents follow it."""


class KVEvents(msgspec.Struct, frozen=True, array_like=True, tag=68):
    """The blocks that one step stored in the prefix cache and removed from it, in order."""

    epoch: int
    step: int
    sequence: int  # of this session's KVEvents, from 0; a missing number is a gap
    events: list[KVEvent]
    gap: bool = False  # events were dropped because the client did not read; a snapshot of the cache follows


class Explanation(msgspec.Struct, frozen=True, array_like=True, tag=85):
    """The scheduler's state after its last step, and the requests asked for."""

    call: int
    session: int  # the caller's
    step: int
    now_ns: int  # of the last step
    policy: str
    pause: int  # 0 = none, 1 = no request begins, 2 = none runs
    num_running: int
    num_waiting: int  # including all that follow
    num_unbegun: int  # kept waiting by a pause
    num_on_hold: int
    num_swapped: int
    num_skipped: int  # rows that wanted tokens in the last step and got none
    budget: int  # tokens of the last step that no request took
    num_usable_blocks: int
    num_free_blocks: int
    num_promised_blocks: int  # of the free ones: needed by running requests for their tokens
    num_fenced_blocks: int  # freed, but in use by a step in flight
    num_watermark_blocks: int  # that starting a request leaves free
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    requests: list[RequestExplanation]
    num_left_out: int  # requests beyond the limit
    num_common_prefix_blocks: int = 0  # leading blocks that all running requests have in common
    max_num_encoder_input_tokens: int = 0  # of images that a step encodes; 0 = the model has no images
    encoder_cache_size: int = 0  # tokens of images whose embeddings are kept
    num_encoder_cache_tokens: int = 0  # of these, in use
    num_pinned_blocks: int = 0  # held by pins
    max_pinned_blocks: int = 0  # that pins may hold
