"""The simulator can fail: each of these bugs, planted into the product, is caught within a few hundred seeds."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

import core.batch.request
import core.border.backlog
from core.batch.kept_states import KeptStates
from core.batch.request import request_from_message
from core.border.lease_clock import LeaseClock
from core.border.ledger import RequestLedger
from core.border.reception import Restorable
from core.border.sessions import Session, Sessions
from core.border.socket_rounds import Border
from core.execution.plan import SavedStates
from core.kv.event_feed import KVFeed
from core.kv.event_log import KVEventLog
from core.scheduling.scheduler import Scheduler
from core.scheduling.waiting_queue import WaitingQueue
from core.tiers.block_store import BlockStore
from frontend.client.journal import Journal
from frontend.client.output_columns import columns_of
from frontend.client.resumption import Resumption
from ipc.tables.arrays import Ints, Rows
from ipc.wire.messages import AddRequest, Outputs, ServerMessage
from tests.simulation.simulation import simulate

MAX_SEEDS = 1000
SOAK = (pytest.mark.soak, pytest.mark.timeout(600))
Patch = pytest.MonkeyPatch


def the_journal_keeps_duplicates(patch: Patch) -> None:
    """Take every row for new, whatever its position."""
    apply = Journal.apply

    def apply_as_new(journal: Journal, outputs: Outputs, now: float) -> Any:
        columns = columns_of(outputs)
        rows = journal.rows_of(columns.numbers, columns.choices)
        positions = np.where(rows >= 0, journal._num_delivered[rows], columns.positions)
        return apply(journal, msgspec.structs.replace(outputs, positions=positions.astype("<u4").tobytes()), now)

    patch.setattr(Journal, "apply", apply_as_new)


def the_engine_ignores_delivered_tokens(patch: Patch) -> None:
    def forget(message: AddRequest, *arguments: Any) -> Any:
        return request_from_message(msgspec.structs.replace(message, delivered=[]), *arguments)

    patch.setattr(core.batch.request, "request_from_message", forget)


def a_block_is_leaked_at_an_abort(patch: Patch) -> None:
    finish_requests = Scheduler.finish_requests

    def leak(scheduler: Scheduler, *arguments: Any) -> None:
        free = scheduler.pool.free
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(scheduler.pool, "free", lambda blocks, step: free(blocks[1:], step))
            finish_requests(scheduler, *arguments)

    patch.setattr(Scheduler, "finish_requests", leak)


def a_request_is_not_sent_again_after_a_loss(patch: Patch) -> None:
    patch.setattr(Resumption, "submit_again", lambda resumption, send, limits, now: False)


def a_token_more_is_said_to_be_delivered(patch: Patch) -> None:
    resubmission = Journal.resubmission

    def exaggerate(journal: Journal, number: int, now: float) -> Any:
        again, *others = resubmission(journal, number, now)
        assert isinstance(again, AddRequest)
        delivered = [tokens + bytes(4) if tokens else tokens for tokens in again.delivered]
        return [msgspec.structs.replace(again, delivered=delivered), *others]

    patch.setattr(Journal, "resubmission", exaggerate)


def a_hold_loses_a_request(patch: Patch) -> None:
    hold = WaitingQueue.hold

    def lose_one(queue: WaitingQueue, client: int, requests: list[Any]) -> None:
        hold(queue, client, requests)
        lane = queue._held[client]
        if len(lane) > 1:
            del lane[next(iter(lane))]

    patch.setattr(WaitingQueue, "hold", lose_one)


def a_stopped_engine_counts_its_own_silence(patch: Patch) -> None:
    def run_on(clock: LeaseClock, now: float, *, has_read: bool) -> None:
        clock.time += now - clock._last
        clock._last = now

    patch.setattr(LeaseClock, "advance", run_on)


def a_new_client_inherits_the_end_of_an_old_one(patch: Patch) -> None:
    """Open sessions without a look at the monitor, while a connection with the same file descriptor has just ended."""
    begin = Border.__init__

    def begin_deaf(border: Border, *arguments: Any, **options: Any) -> None:
        begin(border, *arguments, **options)
        border.reception._on_connect = lambda: None

    patch.setattr(Border, "__init__", begin_deaf)


def merging_forgets_stop_tokens(patch: Patch) -> None:
    patch.setattr(core.border.backlog, "_stop_tokens", lambda parts, row_of: [])


def a_slow_client_loses_a_message(patch: Patch) -> None:
    send = Sessions.send

    def drop(sessions: Sessions, session: Session, message: ServerMessage, now: float) -> None:
        if session.client not in sessions._backlogged or not isinstance(message, Outputs) or message.step % 3:
            send(sessions, session, message, now)

    patch.setattr(Sessions, "send", drop)


def the_ledger_never_learns_of_an_end(patch: Patch) -> None:
    patch.setattr(RequestLedger, "note", lambda ledger, message: None)


def a_new_engine_asks_its_bounds_of_what_was_accepted(patch: Patch) -> None:
    patch.setattr(Restorable, "grant", lambda restorable, num_resumed: 0)


def a_removed_block_is_not_told(patch: Patch) -> None:
    patch.setattr(KVEventLog, "removed", lambda log, contents: None)


def a_follower_that_missed_events_gets_no_snapshot(patch: Patch) -> None:
    patch.setattr(KVFeed, "renew", lambda feed, client: None)


def a_state_is_stored_under_the_name_of_another(patch: Patch) -> None:
    to_store = KeptStates.to_store
    patch.setattr(KeptStates, "to_store", lambda kept, contents: np.roll(to_store(kept, contents), 1))
    patch.setattr(BlockStore, "_is_there", lambda *_: True)


def a_state_is_kept_one_token_late(patch: Patch) -> None:
    save = KeptStates.save

    def late(kept: KeptStates, rows: Rows, counts: Ints) -> SavedStates:
        saved = save(kept, rows, counts)
        return saved._replace(after=np.maximum(saved.after - 1, 1))

    patch.setattr(KeptStates, "save", late)


#: Each bug with the first seed that has shown it, which is tried before all others.
@pytest.mark.parametrize(
    ("plant", "known"),
    [
        pytest.param(a_new_engine_asks_its_bounds_of_what_was_accepted, 0, marks=SOAK),  # needs some 300 seeds
        (the_journal_keeps_duplicates, 8),
        (the_engine_ignores_delivered_tokens, 13),
        (a_block_is_leaked_at_an_abort, 2),
        (a_request_is_not_sent_again_after_a_loss, 0),
        (a_token_more_is_said_to_be_delivered, 13),
        (a_hold_loses_a_request, 13),
        (a_stopped_engine_counts_its_own_silence, 24),
        (a_new_client_inherits_the_end_of_an_old_one, 79),
        (merging_forgets_stop_tokens, 106),
        (a_slow_client_loses_a_message, 5),
        (the_ledger_never_learns_of_an_end, 0),
        (a_removed_block_is_not_told, 8),
        (a_follower_that_missed_events_gets_no_snapshot, 88),
        (a_state_is_stored_under_the_name_of_another, 182),
        (a_state_is_kept_one_token_late, 10),
    ],
)
def test_a_planted_bug_is_caught(plant: Callable[[Patch], None], known: int, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    seeds = (known, *range(MAX_SEEDS))
    seed, error = next(((seed, error) for seed in seeds if (error := failure(seed))), (-1, None))
    assert error is not None, f"{MAX_SEEDS} seeds did not show it"
    assert error.__notes__[0] == f"replay it: python -m tests.simulation {seed}"
    print(f"seed {seed}: {type(error).__name__}: {error}")


def failure(seed: int) -> Exception | None:
    try:
        simulate(seed)
    except Exception as error:
        return error
    return None
