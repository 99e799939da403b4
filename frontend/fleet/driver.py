"""Driver: passes frames between a fleet and its links, and tells the fleet the time."""

from typing import Protocol

from frontend.fleet.fleet import Fleet
from frontend.fleet.membership import Close, Open, Send
from ipc.errors import AddressError, MalformedMessageError
from ipc.wire.messages import decode_server_message


class Connections(Protocol):
    """The connections to replicas: frontend/fleet/links.py, or simulated ones."""

    def open(self, row: int, address: str, hello: bytes) -> None:
        """Connect (again, if there was a connection) and send this first. Errors: AddressError."""

    def send(self, row: int, frame: bytes) -> bool:
        """Send a frame; return False if the replica does not read."""

    def close(self, row: int) -> None:
        """End a connection."""

    def receive(self) -> list[tuple[int, bytes | None]]:
        """Return frames by the rows of their replicas; None: a connection has ended."""


class Driver:
    """One fleet and its connections. Times are monotonic seconds."""

    def __init__(self, fleet: Fleet, links: Connections) -> None:
        self.fleet = fleet
        self._links = links
        self._arrived: list[tuple[int, bytes | None]] = []

    @property
    def has_arrived(self) -> bool:
        """Return whether frames wait to be taken in."""
        return bool(self._arrived)

    def look(self) -> bool:
        """Read what replicas have sent; return whether anything waits to be taken in."""
        self._arrived += self._links.receive()
        return bool(self._arrived)

    def take_in(self, now: float) -> None:
        """Give the fleet what was read."""
        arrived, self._arrived = self._arrived, []
        fleet = self.fleet
        for row, frame in arrived:
            if row not in fleet.replicas.by_row:
                continue
            if frame is None:
                fleet.lose(row, "its connection has ended", now, is_death=True)
                continue
            try:
                message = decode_server_message(frame)
            except MalformedMessageError as error:
                fleet.lose(row, str(error), now)
            else:
                fleet.receive(row, message, now)

    def carry_out(self, now: float) -> None:
        """Carry out the fleet's orders until there are none left."""
        orders = self.fleet.orders
        while orders:
            todo = orders.copy()
            orders.clear()
            for order in todo:
                match order:
                    case Send(row, frame):
                        if not self._links.send(row, frame) and row in self.fleet.replicas.by_row:
                            self.fleet.lose(row, "it does not read", now)
                    case Open(row, address, hello):
                        try:
                            self._links.open(row, address, hello)
                        except AddressError as error:
                            self.fleet.lose(row, str(error), now)
                    case Close(row):
                        self._links.close(row)

    def pass_time(self, now: float) -> float:
        """Let the fleet do what is due; return when the next action is due."""
        due = self.fleet.tick(now)
        self.carry_out(now)
        return due
