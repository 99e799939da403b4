"""RecentStatistics: the engine's last statistics, requested on a thread at most twice a second."""

import asyncio
import time

from frontend.client.client import EngineClient
from ipc.errors import EngineCoreError
from ipc.wire.messages import Statistics

_FRESH_S = 0.4  # how long an answer is reused
_TIMEOUT_S = 0.25


class RecentStatistics:
    """Statistics for many readers, without a call to the engine for each."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._lock = asyncio.Lock()
        self._last: Statistics | None = None
        self._at = 0.0  # monotonic seconds of _last
        self._asked_at = 0.0

    async def read(self) -> tuple[Statistics | None, float | None]:
        """Return the statistics and their age in seconds; None if the engine has sent none yet."""
        async with self._lock:
            if time.monotonic() - self._asked_at > _FRESH_S:
                self._asked_at = time.monotonic()
                try:
                    self._last = await asyncio.to_thread(self._client.statistics, _TIMEOUT_S)
                    self._at = time.monotonic()
                except EngineCoreError:  # busy with a long step, or being restarted: keep the last values
                    pass
        return self._last, None if self._last is None else round(time.monotonic() - self._at, 3)
