"""Simulation: a scenario under its seed, from the first connection to the proof that nothing is left."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from core.batch import kept_states
from core.border import backlog, inbox, sessions, socket_rounds
from core.scheduling import block_exchange, scheduler
from frontend.client import kv_event_stream
from tests.simulation.block_shelf import BlockShelf
from tests.simulation.client_process import ClientProcess
from tests.simulation.engine_process import EngineProcess
from tests.simulation.leftovers import check_nothing_is_held
from tests.simulation.oracle import Excuse
from tests.simulation.scenario import (
    Cut,
    FailStep,
    Fault,
    KillClient,
    KillEngine,
    Scenario,
    Slow,
    StopClient,
    StopEngine,
    draw,
)
from tests.simulation.world import MS, Failure, World

_LONG_QUEUE = 1000  # requests; no scenario has as many
_PATIENCE_NS = 5000 * MS  # of virtual time, in which every request must have ended, and then everything be given back


def simulate(seed: int, *, verbose: bool = False) -> World:
    """Run a seed and return the world at its end. Errors: Failure, or whatever the system under test raises."""
    simulation = Simulation(draw(seed), World(seed, verbose=verbose))
    try:
        simulation.run()
    except BaseException as error:
        error.add_note(f"replay it: python -m tests.simulation {seed}")
        error.add_note("\n".join(simulation.world.log or []))
        raise
    return simulation.world


class Simulation:
    def __init__(self, scenario: Scenario, world: World) -> None:
        self.world = world
        self._scenario = scenario
        self._generation = 0
        self._shelf = BlockShelf()
        world.max_delay_ns, world.duplicate_share = scenario.max_delay_ns, scenario.duplicate_share
        always = {Excuse.SLOW} if scenario.is_tight else set()
        if scenario.config.max_num_queued_requests < _LONG_QUEUE:
            always.add(Excuse.QUEUE_BOUND)
        self._clients = [ClientProcess(world, plan, scenario.rules, always) for plan in scenario.plans]
        for time_ns, fault in scenario.faults:
            world.after(time_ns, partial(self._strike_in_time, fault))

    def run(self) -> None:
        scenario = self._scenario
        bounds: dict[str, Any] = {
            "HOLD_BYTES": scenario.hold_bytes,
            "RELEASE_BYTES": scenario.hold_bytes // 4,
            "MAX_BACKLOG_BYTES": 8 * scenario.hold_bytes,
            "HOLD_S": scenario.hold_s,
        }
        with (
            patch.multiple(sessions, **bounds),
            patch.object(backlog, "MAX_MERGED_BYTES", scenario.max_merged_bytes),
            patch.object(inbox, "MAX_MESSAGES", scenario.max_inbox),
            patch.object(kv_event_stream, "MAX_UNREAD", 2 if scenario.is_tight else kv_event_stream.MAX_UNREAD),
            patch.object(socket_rounds, "_FRAMES_PER_ROUND", scenario.messages_per_round),
            patch.object(kept_states, "LEAST_TOKENS", 4),  # prompts are short
            patch.object(scheduler, "LEAST_TOKENS", 4),
            patch.object(kept_states, "_LEAST_DISTANCE", 8),
            patch.object(block_exchange, "MIN_BLOCKS", 1),
        ):
            self._start_engine()
            self._run_until(lambda: all(client.is_done for client in self._clients), "every request has ended")
            self._run_until(self._is_quiet, "the engine has nothing but the sessions of live clients")
            for client in self._clients:
                client.leave()
            self._run_until(self._is_quiet, "no session is left")
            self._take_census()

    # --- the engine's life ---

    def _start_engine(self) -> None:
        scenario = self._scenario
        self._generation += 1
        self.world.note("engine {} starts", self._generation)
        EngineProcess(
            self.world,
            scenario.config,
            generation=self._generation,
            lease_ms=scenario.lease_ms,
            capacity=scenario.capacity,
            is_paged=scenario.is_paged,
            poison=scenario.rules.poison,
            shelf=self._shelf if scenario.has_states else None,
            on_drain=partial(self._excuse, Excuse.DRAINED),
            on_death=self._mourn_engine,
        )

    def _mourn_engine(self) -> None:
        self._excuse(Excuse.ENGINE_DIED)
        self.world.after(self._scenario.restart_ns, self._start_engine)

    def _excuse(self, excuse: Excuse) -> None:
        for client in self._clients:
            client.excuses.add(excuse)

    # --- faults ---

    def _strike_in_time(self, fault: Fault) -> None:
        """Let a fault happen; those of a client mostly wait until the client has a request that runs."""
        if isinstance(fault, (Cut, Slow, StopClient, KillClient)):
            client = self._clients[fault.client]
            if client.is_done or client.is_killed:
                return
            if not client.is_busy and self.world.chance(0.95):
                self.world.after(self.world.max_delay_ns // 4, partial(self._strike_in_time, fault))
                return
        self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        self.world.note("{}", fault)
        self.world.count(type(fault).__name__)
        engine = self.world.engine
        match fault:
            case Cut(client, engine_notices_ns, client_notices_ns):
                self._clients[client].cut(engine_notices_ns, client_notices_ns)
            case Slow(client, duration_ns):
                self._clients[client].make_slow(duration_ns)
            case StopClient(client, duration_ns):
                self._clients[client].stop_for(duration_ns)
            case KillClient(client, vanishes_ns):
                self._clients[client].kill(vanishes_ns)
            case StopEngine(duration_ns) if engine is not None:
                engine.stop_for(duration_ns)
                self._excuse(Excuse.ENGINE_STOPPED)
            case KillEngine(loses_frames) if engine is not None:
                engine.kill(loses_frames=loses_frames)
            case FailStep() if engine is not None:
                engine.executor.fails = True

    # --- the end ---

    def _run_until(self, is_over: Callable[[], bool], what: str) -> None:
        if not self.world.run_until(is_over, _PATIENCE_NS):
            raise Failure(f"not within {_PATIENCE_NS // MS} ms: {what}; {self._describe()}")

    def _describe(self) -> str:
        engine = self.world.engine
        clients = {client.plan.name: client.describe() for client in self._clients if not client.is_done}
        if engine is None:
            return f"there is no engine; clients: {clients}"
        running, waiting = engine.core.scheduler.get_request_counts()
        return (
            f"{running} requests run and {waiting} wait, {len(engine.border.sessions)} sessions, "
            f"{engine.core.scheduler.pool.num_free} blocks are free; clients: {clients}"
        )

    def _is_quiet(self) -> bool:
        engine = self.world.engine
        num_live = sum(client.has_session for client in self._clients)
        if engine is None or not engine.is_idle or len(engine.border.sessions) != num_live:
            return False
        check_nothing_is_held(engine)
        return all(client.has_copy_of(engine) for client in self._clients)

    def _take_census(self) -> None:
        engine, census = self.world.engine, self.world.census
        assert engine is not None
        census["resumed request"] += engine.router.witness.num_resumed
        stats = engine.core.scheduler.stats
        census["preemption"] += stats.num_preemptions
        census["swapped block"] += stats.num_swapped_in_blocks
        census["accepted draft"] += stats.num_accepted_tokens
        census["prefix cache hit"] += stats.prefix_cache_hits
        if engine.store is not None:
            census["fetched block or state"] += engine.store.exchange.num_fetched
            census["stored block or state"] += engine.store.exchange.num_stored
