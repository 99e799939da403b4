"""ServedAdapters: the engine's adapters as models of their own, by name."""

import asyncio
import time

from frontend.client.client import EngineClient
from ipc.errors import CallFailedError
from ipc.wire.lora_messages import AdapterId, LoraAdapter

#: How long a list of the engine's adapters is used: so soon a name that was loaded or unloaded counts here.
_FRESH_S = 1.0


class ServedAdapters:
    """The adapters that the engine has loaded. For the event loop's thread.

    Nothing is asked of an engine without adapters but once.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._by_name: dict[str, LoraAdapter] = {}
        self._may_have = True  # until the engine has said that it has none
        self._looked_at = float("-inf")  # monotonic seconds
        self._looking: asyncio.Task[None] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the adapters' names, as of the last look."""
        return tuple(self._by_name)

    def find(self, name: str) -> AdapterId | None:
        """Return the adapter of this name, as of the last look."""
        listed = self._by_name.get(name)
        return None if listed is None else AdapterId(listed.digest)

    async def catch_up(self) -> None:
        """Look at the engine's adapters, unless the last look was a moment ago. Several callers share a look."""
        if not self._may_have or time.monotonic() - self._looked_at < _FRESH_S:
            return
        await self.look()

    async def look(self) -> None:
        """Look at the engine's adapters now."""
        if not self._may_have:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        self._looked_at = time.monotonic()
        try:
            listed = await asyncio.to_thread(self._client.lora_adapters)
        except CallFailedError:  # the engine is being started again: what is known stays
            return
        self._may_have = listed.is_enabled
        self._by_name = {one.name: one for one in listed.adapters}
