"""follow_engines(): serve the next engine at an address when the present one does not come back.

If an engine dies and is restarted, the session survives the pause. A session ends when an engine or a router was
stopped orderly, or did not come back in time. Until another one answers there, requests get 503.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable

from frontend.http.wire.server import HttpServer
from frontend.session import EngineHandle
from ipc.errors import EngineCoreError

_LOOK_S = 0.5


async def follow_engines(
    server: HttpServer, address: str, open_engine: Callable[[], EngineHandle], on_news: Callable[[str], None]
) -> None:
    """Look for another engine whenever the present one is gone, until cancelled.

    open_engine: opens a session with the engine at the address, or raises. on_news: called for both events.
    """
    while True:
        await asyncio.sleep(_LOOK_S)
        before = server.service.engine
        if before.client.error is None or server.is_draining:
            continue
        on_news(f"the engine at {address} is gone ({before.client.error}); requests get 503 until one answers there")
        while (engine := await _open(open_engine)) is None:
            await asyncio.sleep(_LOOK_S)
        server.adopt(engine)
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
