"""RayFleet: engines as Ray actors, as the replicas of a router or of AsyncLLM(connect=..., route="prefix").

Ray places, starts and restarts them. Requests and tokens travel over our own sockets, not through Ray. Ray is the extra
`ray`, and is imported only when it is used.
"""

import os
import secrets
import select
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from frontend.engine.process import EngineProcess
from frontend.engine.ray_workers import (
    LOOPBACK,
    connect,
    free_port,
    has_other_nodes,
    import_ray,
    make_folder,
    node_address,
    own_keys,
)
from frontend.engine.supervised_engine import SupervisedEngine
from ipc.errors import ConfigError, EngineCoreError, EngineStartError
from ipc.keys.curve import Keys, new_keys
from ipc.options.given_options import config_from_options

_LOOK_S = 0.5  # between two checks of the actors
_END_S = 10.0  # for all replicas to end by themselves


class Members(Protocol):
    """An object that can change a fleet's replicas: a router's client, as its owner, or the client of
    AsyncLLM(route=...).
    """

    def join(self, address: str) -> None:
        """Let a replica join."""

    def leave(self, address: str, *, move_after: float | None = None) -> None:
        """Let a replica leave."""


class Change(NamedTuple):
    """A replica that has moved. old, new: addresses; None: it has none."""

    old: str | None
    new: str | None


class RayFleet:
    """The actors of one fleet; see deploy(). Used by one thread at a time, except for follow()."""

    def __init__(self, ray: Any, actors: list[Any], folder: str, keys: Keys | None, *, owns_ray: bool) -> None:
        self._ray, self._actors, self._owns_ray = ray, actors, owns_ray
        self._folder, self._suffix = folder, "" if keys is None else f"?keys={folder}"
        self._addresses: list[str | None] = [None] * len(actors)
        self._asked: dict[int, Any] = {}  # by actor: an unanswered request for its address
        self._ended = threading.Event()
        self._followers: list[threading.Thread] = []

    @property
    def addresses(self) -> list[str]:
        """Return the addresses of the replicas that were present at the last check."""
        return [address for address in self._addresses if address is not None]

    def pids(self) -> list[tuple[int, int]]:
        """Return the process ids (actor, engine) of each replica, on its node."""
        return [tuple(pair) for pair in self._ray.get([actor.pids.remote() for actor in self._actors])]

    def wait(self, timeout: float) -> None:
        """Wait until all replicas serve. Errors: EngineStartError."""
        refs = [actor.address.remote() for actor in self._actors]
        try:
            found = self._ray.get(refs, timeout=timeout)
        except self._ray.exceptions.GetTimeoutError:
            text = "does the cluster have the CPUs, GPUs and resources for them? `ray status` says so"
            raise EngineStartError(f"not every replica serves after {timeout:g} s: {text}") from None
        except self._ray.exceptions.RayActorError as error:
            raise EngineStartError(f"a replica has not started: {error}") from None
        self._addresses = [f"{address}{self._suffix}" for address in found]

    def look(self, timeout: float = 0.0) -> list[Change]:
        """Ask all actors for their addresses; return what has changed since the last check.

        An actor that Ray restarts answers when it is back. timeout: seconds to wait for answers.
        """
        for at, actor in enumerate(self._actors):
            if at not in self._asked:
                self._asked[at] = actor.address.remote()
        refs = list(self._asked.values())
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=timeout)
        changes: list[Change] = []
        for at, ref in list(self._asked.items()):
            if ref in ready:
                del self._asked[at]
                if (new := self._answer(ref)) != self._addresses[at]:
                    changes.append(Change(self._addresses[at], new))
                    self._addresses[at] = new
        return changes

    def follow(self, members: Members, on_change: Callable[[Change], None] = lambda change: None) -> None:
        """Report each replica that comes back at another address to a router or a routing client, until close().

        members: such as `llm.client`. on_change: called in the following thread after each change.
        """
        thread = threading.Thread(target=self._follow, args=(members, on_change), name="ray fleet", daemon=True)
        self._followers.append(thread)
        thread.start()

    def close(self) -> None:
        """End all replicas, and the Ray that deploy() has started. A second call does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        for thread in self._followers:
            thread.join()
        refs = [actor.end.remote() for actor in self._actors]
        self._ray.wait(refs, num_returns=len(refs), timeout=_END_S)
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._owns_ray:
            self._ray.shutdown()

    def __enter__(self) -> "RayFleet":
        """Return the fleet."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all replicas."""
        self.close()

    def _answer(self, ref: Any) -> str | None:
        try:
            return f"{self._ray.get(ref)}{self._suffix}"
        except self._ray.exceptions.RayActorError:
            return None  # Ray has given up on it, or it cannot be reached now

    def _follow(self, members: Members, on_change: Callable[[Change], None]) -> None:
        while not self._ended.wait(_LOOK_S):
            for change in self.look():
                try:
                    if change.old is not None:
                        members.leave(change.old, move_after=0.0)
                    if change.new is not None:
                        members.join(change.new)
                except EngineCoreError:
                    return  # the router, or the client, has ended
                on_change(change)


def deploy(
    model: str | None = None,
    *,
    replicas: int = 2,
    num_cpus: float = 1,
    num_gpus: float = 0,
    resources: dict[str, float] | None = None,
    ray_address: str | None = None,
    network: bool | None = None,
    start_timeout: float = 300.0,
    **options: Any,
) -> RayFleet:
    """Start engines of one model as Ray actors, and wait until they serve.

    num_cpus, num_gpus, resources: of each actor, as Ray counts them; if `threads` is not given, an engine gets num_cpus
    threads. ray_address: of a running cluster; None: the cluster that this program is connected to, that of
    RAY_ADDRESS, or a new one that close() ends. network: engines listen on their nodes' addresses, with keys that only
    this fleet has; None: if the cluster has more than one node. options: of each engine, as LLM() takes them. Errors:
    ConfigError; EngineStartError.
    """
    if replicas < 1:
        raise ConfigError(f"a fleet needs at least one replica; got replicas={replicas}")
    options = {"model": model, "threads": max(1, int(num_cpus)), **options}
    if config_from_options(**options).distributed_executor_backend == "ray":
        raise ConfigError("Ray places whole engines here: leave distributed_executor_backend='ray' out, or use LLM()")
    ray = import_ray()
    owns_ray = connect(ray, ray_address, num_cpus=replicas * num_cpus)
    if network is None:
        network = has_other_nodes(ray)
    keys = new_keys() if network else None
    folder = make_folder(keys)
    kind = ray.remote(RayReplica).options(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        resources=resources or {},
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy="SPREAD",
    )
    name, own = (
        f"engine-core-ray-{secrets.token_hex(8)}",
        None if keys is None else (keys.public, keys.secret, keys.engine),
    )
    actors = [kind.remote(options, f"{name}-{number}", own, start_timeout) for number in range(replicas)]
    fleet = RayFleet(ray, actors, folder, keys, owns_ray=owns_ray)
    try:
        fleet.wait(start_timeout)
    except BaseException:
        fleet.close()
        raise
    return fleet


# RayReplica: runs in a Ray actor and owns one engine, to which clients and routers connect over our own sockets.
#
# If the engine dies, it is restarted here, at its address. If the actor dies, its engine ends too, and Ray restarts the
# actor, here or on another node: then the engine has another address.


_RESUME_S = 60.0  # within which clients may expect the next engine at the same address


class RayReplica:
    """One engine. options: of the engine. folder: name of its own folder on any node. keys: of the fleet; None: the
    engine listens on loopback, for programs on the same node.

    Errors: those of an engine's start.
    """

    def __init__(self, options: dict[str, Any], folder: str, keys: tuple[str, str, str] | None, start_s: float) -> None:
        self._folder = Path(tempfile.gettempdir(), folder)
        self._host, listen = LOOPBACK, ""
        if keys is not None:
            self._host, listen = node_address(), own_keys(self._folder, keys)
        self._port = free_port(self._host)
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
