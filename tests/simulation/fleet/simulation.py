"""A fleet under a seed: four played engines, a router, real clients, and deaths of all three kinds."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from core.border import backlog, inbox, sessions, socket_rounds
from frontend.fleet import suspects
from tests.simulation.block_shelf import BlockShelf
from tests.simulation.client_process import ClientProcess
from tests.simulation.engine_parts import ready_executor, served
from tests.simulation.engine_process import EngineProcess
from tests.simulation.fleet.router_process import RouterProcess
from tests.simulation.fleet.site import Site
from tests.simulation.leftovers import check_nothing_is_held
from tests.simulation.oracle import Excuse
from tests.simulation.scenario import Cut, FailStep, Fault, KillClient, KillEngine, Slow, StopClient, StopEngine, draw
from tests.simulation.world import MS, Failure, World

NUM_REPLICAS = 4
_LONG_QUEUE = 1000
_PATIENCE_NS = 20_000 * MS
_MARGIN = 6  # tokens; outputs are short here


def simulate_fleet(seed: int, *, verbose: bool = False) -> World:
    """Run a seed and return the world at its end. Errors: Failure, or whatever the system under test raises."""
    simulation = FleetSimulation(seed, World(seed, verbose=verbose))
    try:
        simulation.run()
    except BaseException as error:
        error.add_note(f"replay it: python -m tests.simulation.fleet {seed}")
        error.add_note("\n".join(simulation.world.log or []))
        raise
    return simulation.world


class FleetSimulation:
    """The scenario of the seed, whose engine is a fleet; what befalls the engine there befalls a replica or the
    router.
    """

    def __init__(self, seed: int, world: World) -> None:
        self.world = world
        self._scenario = scenario = draw(seed)
        self._shelf = BlockShelf()  # of all replicas
        self._chance = chance = random.Random(f"fleet {seed}")
        self._generation = 0
        self._killed_ns = 0
        self._policy = chance.choice(("prefix", "prefix", "least_loaded", "round_robin"))
        self._seed = seed
        world.max_delay_ns, world.duplicate_share = scenario.max_delay_ns, scenario.duplicate_share
        self._sites = {f"ipc:///{index}": Site(world, f"ipc:///{index}") for index in range(NUM_REPLICAS)}
        self._site = Site(world, "ipc:///router")
        always = {Excuse.SLOW} if scenario.is_tight else set()
        if scenario.config.max_num_queued_requests < _LONG_QUEUE:
            always.add(Excuse.QUEUE_BOUND)
        plans = [plan._replace(follows=False) for plan in scenario.plans]
        self.num_requests = sum(len(plan.asks) for plan in plans)
        world_of_clients: Any = self._site
        self._clients = [ClientProcess(world_of_clients, plan, scenario.rules, always) for plan in plans]
        for time_ns, fault in scenario.faults:
            world.after(time_ns, partial(self._strike_in_time, fault))
        for _ in range(chance.choice((0, 1, 2, 3))):
            world.after(chance.randrange(12 * world.max_delay_ns), self._kill_a_replica)

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
            patch.object(suspects, "MARGIN", _MARGIN),
            patch.object(backlog, "MAX_MERGED_BYTES", scenario.max_merged_bytes),
            patch.object(inbox, "MAX_MESSAGES", scenario.max_inbox),
            patch.object(socket_rounds, "_FRAMES_PER_ROUND", scenario.messages_per_round),
        ):
            for site in self._sites.values():
                self._start_replica(site)
            self._start_router()
            self._run_until(lambda: all(client.is_done for client in self._clients), "every request has ended")
            self._run_until(self._is_quiet, "the router and its replicas have nothing but sessions")
            for client in self._clients:
                client.leave()
            self._run_until(self._is_quiet, "no session is left")
            self._take_census()

    # --- lives ---

    def _start_replica(self, site: Site) -> None:
        scenario = self._scenario
        self._generation += 1
        EngineProcess(
            site,  # type: ignore[arg-type]
            scenario.config,
            generation=self._generation,
            lease_ms=scenario.lease_ms,
            capacity=256,
            is_paged=scenario.is_paged,
            poison=scenario.rules.poison,
            shelf=self._shelf if scenario.has_states else None,
            on_drain=lambda: None,
            on_death=partial(self.world.after, self._scenario.restart_ns + MS, partial(self._start_replica, site)),
        )

    def _start_router(self) -> None:
        scenario = self._scenario
        self._generation += 1
        self.world.note("router {} starts", self._generation)
        said = served(scenario.config, ready_executor(scenario.config).info, self._generation, scenario.lease_ms)
        RouterProcess(
            self._site,
            self._sites,
            said,
            generation=self._generation,
            policy=self._policy,
            seed=self._seed,
            capacity=scenario.capacity,
            on_drain=partial(self._excuse, Excuse.DRAINED),
            on_death=self._mourn_router,
        )

    def _mourn_router(self) -> None:
        self._excuse(Excuse.ENGINE_DIED)
        self.world.after(self._scenario.restart_ns, self._start_router)

    def _excuse(self, excuse: Excuse) -> None:
        for client in self._clients:
            client.excuses.add(excuse)

    # --- faults ---

    def _kill_a_replica(self) -> None:
        """Kill one, but not while another death is fresh: two at one place of a request accuse it (suspects.py)."""
        router = self._site.engine
        is_fresh = self.world.now_ns < self._killed_ns + 5 * self.world.max_delay_ns  # maybe not noticed yet
        if not isinstance(router, RouterProcess) or router.is_stopped or not router.is_whole or is_fresh:
            self.world.after(self.world.max_delay_ns // 2, self._kill_a_replica)
            return
        site = self._chance.choice(list(self._sites.values()))
        if site.engine is not None:
            self.world.note("{} is killed", site.address)
            self.world.count("replica killed")
            self._killed_ns = self.world.now_ns
            site.engine.kill(loses_frames=self._chance.random() < 0.5)

    def _strike_in_time(self, fault: Fault) -> None:
        """Let a fault happen; those of a client mostly wait until the client has a request that runs."""
        if isinstance(fault, (Cut, Slow, StopClient, KillClient)):
            client = self._clients[fault.client]
            if client.is_done or client.is_killed:
                return
            if not client.is_busy and self.world.chance(0.95):
                self.world.after(self.world.max_delay_ns // 4, partial(self._strike_in_time, fault))
                return
        self.world.note("{}", fault)
        self.world.count(type(fault).__name__)
        self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        router = self._site.engine
        replica = self._chance.choice(list(self._sites.values())).engine
        match fault:
            case Cut(client, engine_notices_ns, client_notices_ns):
                self._clients[client].cut(engine_notices_ns, client_notices_ns)
            case Slow(client, duration_ns):
                self._clients[client].make_slow(duration_ns)
            case StopClient(client, duration_ns):
                self._clients[client].stop_for(duration_ns)
            case KillClient(client, vanishes_ns):
                self._clients[client].kill(vanishes_ns)
            case StopEngine(duration_ns) if self._chance.random() < 0.5:
                if router is not None:
                    router.stop_for(duration_ns)
                    self._excuse(Excuse.ENGINE_STOPPED)
            case StopEngine(duration_ns) if replica is not None:
                replica.stop_for(duration_ns)
            case KillEngine(loses_frames) if router is not None:
                self.world.count("router killed")
                router.kill(loses_frames=loses_frames)
            case FailStep() if replica is not None:
                replica.executor.fails = True

    # --- the end ---

    def _run_until(self, is_over: Callable[[], bool], what: str) -> None:
        if not self.world.run_until(is_over, _PATIENCE_NS):
            clients = {client.plan.name: client.describe() for client in self._clients if not client.is_done}
            raise Failure(f"not within {_PATIENCE_NS // MS} ms: {what}; clients: {clients}")

    def _is_quiet(self) -> bool:
        router = self._site.engine
        if not isinstance(router, RouterProcess) or not router.is_idle or router.links.has_arrived:
            return False
        num_live = sum(client.has_session for client in self._clients)
        if len(router.border.sessions) != num_live or router.fleet.replicas.is_open.sum() != NUM_REPLICAS:
            return False
        engines = [site.engine for site in self._sites.values()]
        if any(engine is None or not engine.is_idle or len(engine.border.sessions) != 1 for engine in engines):
            return False
        router.check_nothing_is_held()
        for engine in engines:
            assert engine is not None
            check_nothing_is_held(engine)
        return True

    def _take_census(self) -> None:
        router, census = self._site.engine, self.world.census
        assert isinstance(router, RouterProcess)
        census["requests"] += self.num_requests
        census["moved"] += router.fleet.dispatch.num_moved
        census["resumed request"] += router.router.witness.num_resumed
        census["cached tokens counted on"] += router.fleet.dispatch.num_cached_tokens
