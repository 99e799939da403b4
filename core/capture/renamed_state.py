"""rename_state: removes the content from an engine's state at a checkpoint: its live requests and its prefix cache."""

from collections.abc import Mapping, Set
from typing import Any

import msgspec
import numpy as np

from core.batch.request import NO_ROW, Request
from core.capture.renaming import Renaming, places_of
from core.capture.snapshot import Snapshot
from core.kv.block_names import rename_blocks
from core.proposers.offered import OfferedDrafts
from core.scheduling.adapter_slots import AdapterSlots
from core.scheduling.scheduler import Scheduler
from ipc.errors import CaptureFileError
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import NO_INT32S, Int32s
from ipc.wire.block_roots import PLAIN_ROOT


def check_state(state: list[Any]) -> list[Request]:
    """Return the live requests of a state that can be renamed. Errors: CaptureFileError that says why it cannot."""
    scheduler: Scheduler = state[1]
    requests = scheduler.live_requests()
    if any(request.searches for request in requests):
        raise CaptureFileError("a beam search is running at its first checkpoint, and its beams cannot be renamed")
    return requests


def rename_state(state: list[Any], renaming: Renaming, weights: Mapping[str, float]) -> None:
    """Rename all tokens, salts and tenants in an EngineCore.state() that no engine uses yet.

    weights: of clients and tenants, by their new names.
    """
    _, scheduler, _, plans = state
    _blank_rest(state, {id(request) for request in scheduler.live_requests()}, renaming)
    cache, table = scheduler.batch.prefix_cache, scheduler.table
    states: dict[int, bytes] = {}  # by content number: state after its block
    for request in scheduler.live_requests():
        request.params = renaming.any_params(request.params)
        request.sampling = None if request.sampling is None else renaming.params(request.sampling)
        request.root, request.seed = renaming.root(request.root), 0
        request.tenant = renaming.tokens.word(request.tenant)
        request.adapter = renaming.adapter(request.adapter)
        request.features = places_of(request.features)
        request.block_hashes.clear()
        request.first_key = 0
        if request.row == NO_ROW:
            request.token_ids, _ = renaming.tokens.name_all(renaming.begin(request.root), request.token_ids)
            cache.prepare(request)
        else:
            _rename_row(scheduler, renaming, request.row, states)
            request.token_ids = table.token_ids(request.row)

    live_rows = scheduler.running
    table.tokens.blank_rest(live_rows, table.num_tokens[live_rows])

    def tokens_of(content: int, parent: int, tokens: Int32s) -> Int32s:
        if parent not in states:  # a root, or a block that was evicted before this one
            states[parent] = renaming.begin(parent)
        names, states[content] = renaming.tokens.name_all(states[parent], tokens)
        return names

    rename_blocks([scheduler.pool.names, scheduler.batch.host_cache.names], renaming.root, tokens_of)
    if scheduler.exchange is not None:
        name_all, begin = renaming.tokens.name_all, renaming.begin
        scheduler.exchange.rename(renaming.root, lambda root, token_ids: name_all(begin(root), token_ids)[0])
    scheduler.batch.stop_check.rename(renaming.stop)
    scheduler.rename_tenants(renaming.tokens.word, weights)
    # In plans in flight, the tokens of starting requests have already been read, and their drafts no longer decide
    # anything.
    plans[:] = [
        msgspec.structs.replace(
            plan, added=[], added_pooling=[], adapters=[], features=[], draft_token_ids=plan.draft_token_ids * 0
        )
        for plan in plans
    ]


def _blank_rest(state: list[Any], live: Set[int], renaming: Renaming) -> None:
    """Clear what has content apart from the live requests (by id): finished ones still in queues, drafts, slots."""
    for one in Snapshot(state).objects():
        match one:
            case Request() if id(one) not in live:
                one.token_ids, one.block_hashes, one.features = NO_INT32S, [], []
                one.params, one.sampling = SamplingParams(), None
                one.tenant, one.adapter, one.seed, one.root, one.first_key = "", None, 0, PLAIN_ROOT, 0
            case AdapterSlots():
                one.rename(renaming.digest)
            case OfferedDrafts():
                one.blank()
            case _:
                pass


def _rename_row(scheduler: Scheduler, renaming: Renaming, row: int, states: dict[int, bytes]) -> None:
    """Rename the tokens of a running request, and record the states after its named blocks."""
    table, size = scheduler.table, scheduler.block_size
    request = table.request[row]
    assert request is not None, f"row {row} is free"
    named = int(table.num_named_blocks[row])
    contents = scheduler.pool.names.content[table.blocks.read(row, 0, named)].tolist() if named else []
    if named:
        contents[: int(table.num_released[row])] = [0] * int(table.num_released[row])  # others may have these blocks
        contents[-1] = int(table.content[row])
    old, state, parts = table.token_ids(row), renaming.begin(request.root), []
    for index, content in enumerate(contents):
        names, state = renaming.tokens.name_all(state, old[index * size : (index + 1) * size])
        parts.append(names)
        if content:
            states[content] = state
    names, _ = renaming.tokens.name_all(state, old[named * size :])
    new = np.concatenate([*parts, names])
    table.tokens.set(np.full(len(new), row), np.arange(len(new)), new)
