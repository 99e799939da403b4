"""PlayedLinks: frontend/fleet/links.py over the played network."""

from collections import deque
from collections.abc import Callable
from functools import partial

from tests.simulation.fleet.site import Site
from tests.simulation.network import Connection
from tests.simulation.world import MS

_RETRY_NS = 2 * MS


class _Link:
    """One connection, made as soon as an engine listens."""

    def __init__(self, links: "PlayedLinks", row: int) -> None:
        self.connection: Connection | None = None
        self.unsent: list[bytes] = []
        self.is_closed = False
        self._links = links
        self._row = row

    def arrive(self, connection: Connection, frame: bytes) -> None:
        if not self.is_closed:
            self._links.put(self._row, frame, connection)

    def lose(self, connection: Connection, *, is_engine_dead: bool) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._links.put(self._row, None, connection)


class PlayedLinks:
    """The connections of a played router. on_arrival: called when receive() has something."""

    def __init__(self, sites: dict[str, Site], on_arrival: Callable[[], None]) -> None:
        self._sites = sites
        self._on_arrival = on_arrival
        self._links: dict[int, _Link] = {}
        self._arrived: deque[tuple[int, bytes | None, Connection]] = deque()

    @property
    def has_arrived(self) -> bool:
        return bool(self._arrived)

    def open(self, row: int, address: str, hello: bytes) -> None:
        self.close(row)
        link = self._links[row] = _Link(self, row)
        link.unsent.append(hello)
        self._connect(link, self._sites[address])

    def _connect(self, link: _Link, site: Site) -> None:
        if link.is_closed:
            return
        if site.engine is None:
            site.after(_RETRY_NS, partial(self._connect, link, site))
            return
        link.connection = site.engine.router.connect(link)
        for frame in link.unsent:
            link.connection.up(frame)

    def send(self, row: int, frame: bytes) -> bool:
        link = self._links.get(row)
        if link is not None and not link.is_closed:
            if link.connection is None:
                link.unsent.append(frame)
            else:
                link.connection.up(frame)
        return True

    def close(self, row: int) -> None:
        link = self._links.pop(row, None)
        if link is not None:
            self._arrived = deque(one for one in self._arrived if one[0] != row)
            if not link.is_closed and link.connection is not None:
                link.connection.close()
            link.is_closed = True

    def put(self, row: int, frame: bytes | None, connection: Connection) -> None:
        self._arrived.append((row, frame, connection))
        self._on_arrival()

    def receive(self) -> list[tuple[int, bytes | None]]:
        arrived: list[tuple[int, bytes | None]] = []
        for row, frame, connection in self._arrived:
            connection.num_waiting -= frame is not None
            arrived.append((row, frame))
        self._arrived.clear()
        return arrived

    def cut(self, row: int, engine_notices_ns: int, router_notices_ns: int) -> bool:
        """Cut a connection, if there is one; each side notices after so long."""
        link = self._links.get(row)
        if link is None or link.connection is None or link.is_closed:
            return False
        link.connection.cut(engine_notices_ns, router_notices_ns)
        return True

    def end(self) -> None:
        """Close everything: the process is dead."""
        for row in list(self._links):
            self.close(row)
