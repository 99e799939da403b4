"""Request: the scheduler's state of one request, apart from its row in the batch table."""

from typing import NamedTuple

import msgspec
import numpy as np

from ipc.params.beam_search import num_rows
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import NO_INT32S, Int32s
from ipc.wire.block_roots import root_of_message
from ipc.wire.feature_messages import FeatureUse
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import AddRequest, Submission
from ipc.wire.pin_messages import Pin
from ipc.wire.pooling_messages import AddPooling

NO_ROW = -1


class Swapped(NamedTuple):
    """The host's copy of a preempted request."""

    slots: Int32s  # blocks of the host pool, in the order of Batch.copied_blocks()
    num_computed_tokens: int  # number of tokens in these blocks
    states: Int32s = NO_INT32S  # with recurrent layers: the slot of the state after these tokens


class Request(msgspec.Struct, eq=False):
    """One choice of a client's request, owned by the scheduler.

    While `row` is set, the table holds the tokens, and `token_ids` is stale.
    """

    serial: int  # arrival order over the engine's life
    client: int
    number: int
    token_ids: Int32s  # prompt, then output so far
    num_prompt_tokens: int
    max_total_tokens: int  # prompt plus output, limited by max_model_len
    max_computed_tokens: int  # of those: how many the request can ever compute, and hold in the KV cache
    params: SamplingParams | PoolingParams
    seed: int
    priority: int
    root: int  # content that its first block follows, from its cache salt and adapter; see ipc/wire/block_roots.py
    party: int = 0  # who is charged under policy fair: the client, or the negative number of its tenant
    tenant: str = ""
    adapter: AdapterId | None = None  # the object from its message, so that the executor keeps the adapter
    features: list[FeatureUse] = msgspec.field(default_factory=list)  # also the objects from its message
    choice: int = 0
    # all choices of its message, including this one; empty: it is the only one
    choices: list["Request"] = msgspec.field(default_factory=list)
    follows: bool = False  # another choice computes their prompt, and this one waits for it
    row: int = NO_ROW
    rank: int = 0  # set by the scheduling policy: smaller goes first, then the smaller serial
    level: int = 0  # set by the scheduling policy: the request may take room from running ones of a larger level
    arrival_ns: int = 0  # on the clock of the step
    ticket: int = 0  # number of its entry in the waiting queue; 0 = it has none
    block_hashes: list[int] = msgspec.field(default_factory=list)  # hashes of its whole blocks
    first_key: int = 0  # lookup key of its first block; 0 = that block is not whole
    swapped: Swapped | None = None
    num_preemptions: int = 0  # by running requests that needed blocks
    num_overtaken: int = 0  # requests that started while this one was first and did not fit
    num_computed_before: int = 0  # the most tokens computed when it was preempted; computing them again is waste
    num_drafted: int = 0  # drafts verified until its last preemption
    num_accepted: int = 0
    is_whole: bool = False  # no token may be taken from a cache, because the output of all of them is used
    has_started: bool = False
    is_finished: bool = False
    awaits: int = 0  # ticket of the blocks that it waits for, from a store beyond the host; 0 = none
    known_end: int = 0  # with recurrent layers: first tokens that were in the cache; see core/batch/kept_states.py
    has_asked: bool = False  # it has asked for such blocks and got an answer
    pins: tuple[Pin, ...] = ()  # of its prompt, until it is queued
    state_places: tuple[int, ...] = ()  # with recurrent layers: after how many tokens pins want the state
    #: Derived from `params`, and stored because a start looks at them several times:
    sampling: SamplingParams | None = None  # the parameters for its tokens; None for a pooling request
    searches: bool = False  # it is a beam of a beam search

    def __post_init__(self) -> None:
        params = self.params
        if type(params) is SamplingParams:
            self.sampling, self.searches = params, params.use_beam_search

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens. Valid while the request waits."""
        return len(self.token_ids)

    @property
    def needs_whole_prompt(self) -> bool:
        """Return whether the prompt must be computed from the first token on: to pool it, or to report its logprobs.

        Valid while the request waits.
        """
        params = self.sampling
        return self.is_whole or (
            params is not None and params.prompt_logprobs is not None and self.num_output_tokens == 0
        )

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens. Valid while the request waits."""
        return self.num_tokens - self.num_prompt_tokens


def requests_from_message(
    message: Submission,
    client: int,
    serial: int,
    max_model_len: int,
    whole_prompt_tasks: tuple[str, ...] = (),
    kind_stride: int = 0,
) -> list[Request]:
    """Return the requests of a valid message, one per choice or beam, with serials counting from `serial`.

    whole_prompt_tasks: see ModelInfo. kind_stride: added to the token ids of a second text.
    """
    match message:
        case AddPooling():
            return [_pooling_request(message, client, serial, whole_prompt_tasks, kind_stride)]
        case AddRequest():
            choices = range(num_rows(message.params))
            return [request_from_message(message, client, serial + choice, max_model_len, choice) for choice in choices]


def request_from_message(message: AddRequest, client: int, serial: int, max_model_len: int, choice: int = 0) -> Request:
    """Return the request for one choice of a valid message. Its prompt is not empty and leaves room for one token.

    Only the first choice has the prompt's log probabilities.
    """
    params = message.params
    if choice and params.prompt_logprobs is not None:
        params = params.changed(prompt_logprobs=None)
    prompt = np.frombuffer(message.prompt_token_ids, "<i4")
    delivered = np.frombuffer(message.delivered[choice] if choice < len(message.delivered) else b"", "<i4")
    # max_tokens counts generated tokens. The last of them ends the request, so nothing is computed from it.
    wanted = max_model_len if message.params.max_tokens is None else len(prompt) + message.params.max_tokens
    max_total_tokens = min(wanted, max_model_len)
    return Request(
        serial=serial,
        client=client,
        number=message.number,
        token_ids=np.concatenate([prompt, delivered]).astype(np.int32, copy=False),
        num_prompt_tokens=len(prompt),
        max_total_tokens=max_total_tokens,
        max_computed_tokens=max_total_tokens - 1,
        params=params,
        seed=message.seed,
        priority=message.priority,
        root=root_of_message(message),
        party=client,
        tenant=message.tenant,
        adapter=message.adapter,
        features=message.features,
        choice=choice,
        pins=message.pins,
    )


def _pooling_request(
    message: AddPooling, client: int, serial: int, whole_prompt_tasks: tuple[str, ...], kind_stride: int
) -> Request:
    """Return the request of a valid message. All of its tokens are computed, including the last one.

    Its end is signalled by one more token, which is a placeholder while the last step is in flight.
    """
    prompt = np.frombuffer(message.prompt_token_ids, "<i4").astype(np.int32)
    if message.second_from:
        prompt[message.second_from :] += kind_stride
    return Request(
        serial=serial,
        client=client,
        number=message.number,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        max_total_tokens=len(prompt) + 1,
        max_computed_tokens=len(prompt),
        params=message.params,
        seed=0,
        priority=message.priority,
        root=root_of_message(message),
        party=client,
        tenant=message.tenant,
        adapter=message.adapter,
        features=message.features,
        is_whole=message.params.task in whole_prompt_tasks,
    )
