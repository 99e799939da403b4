"""The check that an engine without requests holds nothing for any."""

from typing import Any

from tests.simulation.engine_process import EngineProcess
from tests.simulation.world import Failure


def check_nothing_is_held(engine: EngineProcess) -> None:
    """Check an idle engine, whose sessions may be open. Errors: Failure with what is left."""
    engine.core.scheduler.check_integrity()
    left = {name: (found, due) for name, (found, due) in _counts(engine).items() if found != due}
    if left:
        raise Failure(f"an idle engine holds something; (found, due): {left}")


def _counts(engine: EngineProcess) -> dict[str, tuple[Any, Any]]:
    scheduler, inbox, sessions = engine.core.scheduler, engine.border.inbox, engine.border.sessions
    pool, waiting, swap_space = scheduler.pool, scheduler.waiting, scheduler.preemption.swap_space
    of_sessions = [
        (session.backlog.num_bytes, len(session.requests), session.requests.account.num_bytes, session.num_calls)
        for session in sessions.all
    ]
    return {
        "requests that run and wait": (scheduler.get_request_counts(), (0, 0)),
        "tokens that wait": (waiting.num_tokens, 0),
        "requests on hold": (waiting.num_held, 0),
        "requests with a copy on the host": (scheduler.preemption.num_swapped, 0),
        "free blocks": (pool.num_free, pool.num_blocks - 1 - len(scheduler.pins.blocks)),
        "fenced blocks": (pool.num_fenced, 0),
        "free swap blocks": (swap_space.num_free, swap_space.num_slots),
        "steps in flight": (engine.core.pipeline.num_in_flight, 0),
        "queued requests": (inbox.num_queued_requests, 0),
        "queued tokens": (inbox.num_queued_tokens, 0),
        "sessions on hold": (sum(session.held_since is not None for session in sessions.all), 0),
        "of sessions: bytes to send, requests, their bytes, calls": (of_sessions, [(0, 0, 0, 0)] * len(of_sessions)),
    }
