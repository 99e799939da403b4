"""ServedAdapters: the engine's adapters as separate models, by name."""

import asyncio
import time

from frontend.client.client import EngineClient
from ipc.errors import CallFailedError
from ipc.wire.lora_messages import AdapterId, LoraAdapter

#: How long a list of the engine's adapters is used: loaded or unloaded names take effect here after that time.
_FRESH_S = 1.0


class ServedAdapters:
    """The adapters that the engine has loaded. For the event loop's thread.

    An engine without adapters is asked only once.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._by_name: dict[str, LoraAdapter] = {}
        self._may_have = True  # until the engine has said that it has none
        self._looked_at = float("-inf")  # monotonic seconds
        self._looking: asyncio.Task[None] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the adapters' names from the last answer."""
        return tuple(self._by_name)

    def find(self, name: str) -> AdapterId | None:
        """Return the adapter of this name from the last answer."""
        listed = self._by_name.get(name)
        return None if listed is None else AdapterId(listed.digest)

    async def catch_up(self) -> None:
        """Ask for the engine's adapters, unless the last answer is new enough. Several callers share one call."""
        if not self._may_have or time.monotonic() - self._looked_at < _FRESH_S:
            return
        await self.look()

    async def look(self) -> None:
        """Ask for the engine's adapters now."""
        if not self._may_have:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        self._looked_at = time.monotonic()
        try:
            listed = await asyncio.to_thread(self._client.lora_adapters)
        except CallFailedError:  # the engine is being restarted: keep the known list
            return
        self._may_have = listed.is_enabled
        self._by_name = {one.name: one for one in listed.adapters}
