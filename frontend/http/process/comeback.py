"""EngineFollower: serve the next engine at an address when the present one does not come back.

If an engine dies and is restarted, the session survives the pause. A session ends when an engine or a router was
stopped orderly, or did not come back in time. Until another one answers there, requests get 503.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable

from frontend.http.process.options import HttpOptions
from frontend.http.wire.server import HttpServer, one_model
from frontend.session import EngineHandle
from ipc.errors import EngineCoreError

_LOOK_S = 0.5


class EngineFollower:
    """engine: the present one. options: of its server. open_engine: opens a session with the next one, or raises."""

    def __init__(
        self, server: HttpServer, engine: EngineHandle, options: HttpOptions, open_engine: Callable[[], EngineHandle]
    ) -> None:
        self.engine = engine
        self._server, self._options, self._open_engine = server, options, open_engine

    async def follow(self, address: str, on_news: Callable[[str], None]) -> None:
        """Look for another engine at the address whenever the present one is gone, until cancelled.

        on_news: called for both events.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            before = self.engine
            if before.client.error is None or self._server.is_draining:
                continue
            gone = f"the engine at {address} is gone ({before.client.error})"
            on_news(f"{gone}; requests get 503 until one answers there")
            while (engine := await _open(self._open_engine)) is None:
                await asyncio.sleep(_LOOK_S)
            self.engine = engine
            self._server.adopt(one_model(engine, self._options))
            before.close()
            on_news(f"an engine answers at {address}; requests are served again")


async def _open(open_engine: Callable[[], EngineHandle]) -> EngineHandle | None:
    """Return the session; None if no engine answers. A thread waits for the answer.

    The process's end does not wait for that thread.
    """
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[EngineHandle | None] = loop.create_future()

    def finish(engine: EngineHandle | None) -> None:
        if not opened.done():
            opened.set_result(engine)
        elif engine is not None:  # it is no longer waited for
            engine.close()

    def run() -> None:
        engine: EngineHandle | None = None
        with contextlib.suppress(EngineCoreError):
            engine = open_engine()
        try:
            loop.call_soon_threadsafe(finish, engine)
        except RuntimeError:  # the loop is closed
            if engine is not None:
                engine.close()

    threading.Thread(target=run, name="http-comeback", daemon=True).start()
    return await opened
