"""RouterProcess: a router under the world's clock: the engine's border, a RouterEngine and played links."""

from collections.abc import Callable, Sequence

import msgspec

from core.border.reception import Served
from core.border.socket_rounds import AddressedMessage, Border
from frontend.fleet.driver import Driver
from frontend.fleet.fleet import Fleet
from tests.simulation.engine_process import EngineProcess
from tests.simulation.fleet.links import PlayedLinks
from tests.simulation.fleet.site import Site
from tests.simulation.network import Router
from tests.simulation.world import MS, Failure

_TICK_NS = 20 * MS


class RouterProcess(EngineProcess):
    """A router that can be stopped and killed. said: what it tells its clients of itself."""

    def __init__(
        self,
        site: Site,
        sites: dict[str, Site],
        said: Served,
        *,
        generation: int,
        policy: str,
        seed: int,
        capacity: int,
        on_drain: Callable[[], None],
        on_death: Callable[[], None],
    ) -> None:
        self._world = site  # type: ignore[assignment]
        self._on_drain, self._on_death = on_drain, on_death
        self.router = Router(site, capacity, self._read_soon, self._wake_late)  # type: ignore[arg-type]
        self.links = PlayedLinks(sites, self._hear)
        self.fleet = Fleet(policy=policy, seed=seed, epoch=generation, patience_s=1000.0)
        driver = Driver(self.fleet, self.links)
        from tools.commands.route.__main__ import RouterEngine

        self.core = RouterEngine(driver, site.seconds)  # type: ignore[assignment]
        self.is_dead, self.stopped_until_ns = False, 0
        self._round_at_ns: int | None = None
        self._is_stepping = self._is_reading = False
        self._num_steps = 0
        welcome = msgspec.structs.replace(said.welcome, engine_id=f"router {generation}", epoch=generation)
        self.border = Border(
            self.router,  # type: ignore[arg-type]
            self.router,  # type: ignore[arg-type]
            msgspec.structs.replace(said, welcome=welcome),
            site.seconds(),
            on_drain=self.drain,
            on_shutdown=lambda: None,
        )
        self.border.sessions.has_read_all = lambda fd: True
        site.engine = self
        for address in sites:
            self.fleet.membership.join(address)
        driver.carry_out(site.seconds())
        self._tick()

    def kill(self, *, loses_frames: bool) -> None:
        if not self.is_dead:
            self.links.end()
        super().kill(loses_frames=loses_frames)

    @property
    def is_whole(self) -> bool:
        """Whether all replicas are open, as far as the router knows, and no request is under suspicion."""
        table = self.fleet.replicas
        return len(table.by_row) == table.is_open.sum() and not len(self.fleet.dispatch.suspects)

    def _hear(self) -> None:
        if not self.is_dead:
            self._step_later(self._world.delay() // 8)

    def _tick(self) -> None:
        if not self.is_dead:
            if not self.is_stopped:
                self.core.turn(0)  # type: ignore[attr-defined]
            self._world.after(_TICK_NS, self._tick)

    def _step(self) -> None:
        if not self.is_dead and not self.is_stopped:
            self.core.look_ahead()  # type: ignore[attr-defined]
        super()._step()

    def _end_step(self, outputs: Sequence[AddressedMessage]) -> None:
        super()._end_step(outputs)
        if not self.is_dead and not self.is_stopped:
            self.core.turn(0)  # type: ignore[attr-defined]
            if self.links.has_arrived or self.fleet.to_clients:
                self._step_later(0)

    def _check_core(self) -> None:
        """Recount what placement counts. Errors: Failure."""
        table, requests = self.fleet.replicas, self.fleet.requests
        for row in table.by_row:
            placed = requests.rows_at(row)
            counted = int(table.live[row]), int(table.queued[row])
            if counted != (len(placed), int(requests.missing[placed].sum())):
                raise Failure(f"replica {row} is counted {counted}, and has {placed}")

    def check_nothing_is_held(self) -> None:
        """Check an idle router. Errors: Failure with what is left."""
        fleet, inbox, sessions = self.fleet, self.border.inbox, self.border.sessions
        self._check_core()
        found = {
            "requests": fleet.requests.num_live,
            "waiting": fleet.requests.num_waiting,
            "waiting tokens": fleet.requests.num_waiting_tokens,
            "queued": fleet.dispatch.num_queued,
            "placed": int(fleet.replicas.live.sum()),
            "tokens to compute": int(fleet.replicas.queued.sum()),
            "suspects": len(fleet.dispatch.suspects),
            "calls": int(bool(fleet.calls)),
            "clients": fleet.requests.num_clients,
            "queued at the border": inbox.num_queued_requests + inbox.num_queued_tokens,
            "of sessions": sum(
                len(one.requests) + one.requests.account.num_bytes + one.num_calls for one in sessions.all
            ),
        }
        if left := {name: count for name, count in found.items() if count}:
            raise Failure(f"an idle router holds something: {left}")
