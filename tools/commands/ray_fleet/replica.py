"""RayReplica: runs in a Ray actor and owns one engine, to which clients and routers connect over our own sockets.

If the engine dies, it is restarted here, at its address. If the actor dies, its engine ends too, and Ray restarts the
actor, here or on another node: then the engine has another address.
"""

import importlib
import os
import select
import shutil
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from frontend.engine.process import EngineProcess
from frontend.engine.supervised_engine import SupervisedEngine
from ipc.keys.curve import Keys, write_engine_keys
from ipc.options.given_options import config_from_options

_RESUME_S = 60.0  # within which clients may expect the next engine at the same address
_LOOPBACK = "127.0.0.1"


class RayReplica:
    """One engine. options: of the engine. folder: name of its own folder on any node. keys: of the fleet; None: the
    engine listens on loopback, for programs on the same node.

    Errors: those of an engine's start.
    """

    def __init__(self, options: dict[str, Any], folder: str, keys: tuple[str, str, str] | None, start_s: float) -> None:
        self._folder = Path(tempfile.gettempdir(), folder)
        self._host, listen = _LOOPBACK, ""
        if keys is not None:
            self._host, listen = _node_address(), f"?keys={self._folder}"
            shutil.rmtree(self._folder, ignore_errors=True)  # the folder of this actor before it died
            write_engine_keys(str(self._folder), Keys(*keys))
        self._port = _free_port(self._host)
        process = EngineProcess(
            config_from_options(**options),
            listen=f"tcp://{self._host}:{self._port}{listen}",
            start_timeout=start_s,
            resume_s=_RESUME_S,
        )
        self._engine, self._is_ending = SupervisedEngine(process, on_news=_say), False
        self._engine.start()
        self._engine.wait_ready()
        threading.Thread(target=self._watch, name="engine-end", daemon=True).start()

    def address(self) -> str:
        """Return the engine's address, without keys."""
        return f"tcp://{self._host}:{self._port}"

    def pids(self) -> tuple[int, int]:
        """Return the process ids of this actor and of its engine."""
        return os.getpid(), self._engine.process.pid

    def end(self) -> None:
        """Drain the engine for a short time, and end it."""
        self._is_ending = True
        self._engine.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        """End the actor if its engine has died too often, so that Ray restarts both, possibly on another node."""
        if self._engine.ended_fd >= 0:
            select.select([self._engine.ended_fd], [], [])
            if not self._is_ending:
                _say(f"{self._engine.describe_end()}; the actor ends, and Ray restarts it")
                os._exit(1)


def _say(text: str) -> None:
    print(f"engine-core: {text}", file=sys.stderr, flush=True)


def _node_address() -> str:
    return str(importlib.import_module("ray").util.get_node_ip_address())


def _free_port(host: str) -> int:
    """Return a port that is free now: the engine keeps its address across restarts."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
