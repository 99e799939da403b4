"""RecentStatistics: the engine's last statistics, asked for on a thread and at most twice a second."""

import asyncio
import time

from frontend.client.client import EngineClient
from ipc.errors import EngineCoreError
from ipc.wire.messages import Statistics

_FRESH_S = 0.4  # for which an answer is given again
_TIMEOUT_S = 0.25


class RecentStatistics:
    """What many readers may ask for without a question to the engine for each."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._lock = asyncio.Lock()
        self._last: Statistics | None = None
        self._at = 0.0  # monotonic seconds of _last
        self._asked_at = 0.0

    async def read(self) -> tuple[Statistics | None, float | None]:
        """Return the statistics and their age in seconds; None where the engine has given none yet."""
        async with self._lock:
            if time.monotonic() - self._asked_at > _FRESH_S:
                self._asked_at = time.monotonic()
                try:
                    self._last = await asyncio.to_thread(self._client.statistics, _TIMEOUT_S)
                    self._at = time.monotonic()
                except EngineCoreError:  # busy with a long step, or being started again: the last values stay
                    pass
        return self._last, None if self._last is None else round(time.monotonic() - self._at, 3)
