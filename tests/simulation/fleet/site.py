"""Site: one played address: a world of its own as far as its engine and its clients can see."""

from typing import TYPE_CHECKING, Any

from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.engine_process import EngineProcess


class Site:
    """The world, with the engine that listens here; None between two."""

    def __init__(self, world: World, address: str) -> None:
        self.engine: EngineProcess | None = None
        self.address = address
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)
